// sequence.cuh -- where the queries and keys of a batch element lie (VARLEN), and how far its mask has moved. Without VARLEN all are alike, and
// nothing of this is left of a kernel.
//
//   padded    each batch element has its own rows in memory, of which the first ones are its queries, or its keys. What the others hold is not
//             read; results and gradients there are 0
//   packed    the rows of all sequences lie one behind the other, `offsets` says where each begins. Behind the last one there may be rows that
//             belong to none: they make one more sequence, which sees nothing
//   paged     keys and values lie in pages of equal size, in any order
//
// A tile has rows of one sequence only. Of packed rows, sequence i has the tiles from offset_i / TILE + i on, whichever its length is: each
// begins and ends anywhere, so it takes at most one tile more than its rows fill. A block finds the sequence of a tile by its offset.
#pragma once
#include "tile/copy.cuh"
#include "tile/mask.cuh"
#include "tile/scheduler.cuh"

enum Side { QUERIES, KEYS };
template <Side SIDE> constexpr int TILE_ROWS = SIDE == QUERIES ? TILE_Q : TILE_KV;
template <Side SIDE, typename Params> OP int rows_of_array(const Params& p) { return SIDE == QUERIES ? p.len_q : p.len_kv; }

// The queries of a sequence, or its keys.
struct SequenceRows {
  int begin;                                                  // row of the array
  int count;                                                  // how many there are
  int room;                                                   // rows from the first one on that are no other sequence's
  u32 element;                                                // batch element of the array: packed rows have one for all
  int tile0;                                                  // number of its first tile there
  OP int first() const { return begin; }
  OP int len() const { return count; }
  OP int end() const { return begin + count; }
  OP int end_of_room() const { return begin + room; }
  OP u32 batch_number() const { return element; }
  OP int first_tile() const { return tile0; }
};
// The same where all batch elements are alike: nothing is computed, and all that is asked is what the kernel was told.
template <Side SIDE, typename Params> struct UniformRows {
  const Params& p;
  u32 number;
  OP int first() const { return 0; }
  OP int len() const { return rows_of_array<SIDE>(p); }
  OP int end() const { return len(); }
  OP int end_of_room() const { return len(); }
  OP u32 batch_number() const { return number; }
  OP int first_tile() const { return 0; }
};
template <Side SIDE, typename Params> using Rows = typename ChooseType<VARLEN, SequenceRows, UniformRows<SIDE, Params>>::type;

enum LengthArray { OFFSETS_Q = 1, OFFSETS_KV = 2, LENGTHS_Q = 4, LENGTHS_KV = 8, CACHE_BATCH = 16, PAGES = 32 };   // bits of SequenceParams::wide

// A number of such an array, at most `most`.
OP int read_length(const SequenceParams& s, const void* array, LengthArray which, i64 i, int most) {
  if (s.wide & which) {
    count_read(sizeof(i64));
    return int(max_of(min_of(static_cast<const i64*>(array)[i], i64(most)), i64(0)));
  }
  count_read(sizeof(int));
  return max_of(min_of(static_cast<const int*>(array)[i], most), 0);
}

// One side of a sequence; `rows` is how many the array has.
OP SequenceRows read_rows(const SequenceParams& s, const void* offsets, LengthArray bit_of_offsets, const void* lengths,
                          LengthArray bit_of_lengths, u32 number, int rows, int tile) {
  SequenceRows of{0, rows, rows, number, 0};
  const bool is_gap = number >= u32(s.sequences);
  if (offsets) {
    of.begin = read_length(s, offsets, bit_of_offsets, number, rows);
    of.room = max_of(is_gap ? rows : read_length(s, offsets, bit_of_offsets, number + 1, rows), of.begin) - of.begin;
    of.element = 0;
    of.tile0 = of.begin / tile + int(number);
  }
  of.count = is_gap ? 0 : lengths ? read_length(s, lengths, bit_of_lengths, number, of.room) : of.room;
  return of;
}

// A mask whose queries and keys end together, for other lengths.
OP MaskParams moved(const MaskParams& mask, int by) {
  constexpr int UNBOUNDED = 1 << 30;
  MaskParams result = mask;
  if (mask.left > -UNBOUNDED) result.left += by;
  if (mask.right < UNBOUNDED) result.right += by;
  return result;
}

// The rows of a side of a sequence, and its mask.
template <Side SIDE, typename Params> OP Rows<SIDE, Params> rows_of_sequence(const Params& p, u32 number) {
  if constexpr (!VARLEN) {
    return {p, number};
  } else {
    const SequenceParams& s = p.sequences;
    constexpr bool Q = SIDE == QUERIES;
    constexpr int of_query = Q ? INNER_HEADS : 1;             // rows
    SequenceRows rows = read_rows(s, Q ? s.offsets_q : s.offsets_kv, Q ? OFFSETS_Q : OFFSETS_KV, Q ? s.lengths_q : s.lengths_kv,
                                  Q ? LENGTHS_Q : LENGTHS_KV, number, rows_of_array<SIDE>(p) / of_query, TILE_ROWS<SIDE> / of_query);
    rows.begin *= of_query, rows.count *= of_query, rows.room *= of_query;
    return rows;
  }
}
template <typename Params> struct VarlenSequence {
  Rows<QUERIES, Params> q;
  Rows<KEYS, Params> kv;
  MaskParams moved_mask;
  OP const MaskParams& mask() const { return moved_mask; }
};
template <typename Params> struct UniformSequence {
  Rows<QUERIES, Params> q;
  Rows<KEYS, Params> kv;
  OP const MaskParams& mask() const { return q.p.mask; }
};
template <typename Params> using Sequence = typename ChooseType<VARLEN, VarlenSequence<Params>, UniformSequence<Params>>::type;
// The mask of a sequence with so many rows and keys.
template <typename Params> OP MaskParams mask_of_sequence(const Params& p, int rows, int keys) {
  const int queries = PACK_GQA ? int(p.mask.queries_divmod.divisor) : rows / INNER_HEADS;
  MaskParams mask = moved(p.mask, p.sequences.moves ? keys - queries : 0);
  mask.prefix = min_of(p.mask.prefix, keys);
  return mask;
}
template <typename Params> OP Sequence<Params> sequence_of(const Params& p, u32 number) {
  if constexpr (!VARLEN) {
    return {{p, number}, {p, number}};
  } else {
    Sequence<Params> seq{rows_of_sequence<QUERIES>(p, number), rows_of_sequence<KEYS>(p, number), {}};
    seq.moved_mask = mask_of_sequence(p, seq.q.len(), seq.kv.len());
    return seq;
  }
}

// the offsets of the sequences of a side, or null
template <Side SIDE, typename Params> OP const void* offsets_of(const Params& p) {
  if constexpr (!VARLEN) return nullptr;
  else return SIDE == QUERIES ? p.sequences.offsets_q : p.sequences.offsets_kv;
}

// How many tiles a batch element of the array has room for.
template <Side SIDE, typename Params> OP int tiles_of(const Params& p) {
  if constexpr (VARLEN) if (offsets_of<SIDE>(p)) return rows_of_array<SIDE>(p) / TILE_ROWS<SIDE> + p.sequences.sequences + 1;
  return ceil_div(rows_of_array<SIDE>(p), TILE_ROWS<SIDE>);
}

// The sequence that tile number `tile` of packed rows is for: the last one whose first tile is not behind it. Each lane asks one of 32, so a
// thousand sequences take two questions.
template <Side SIDE, typename Params> OP u32 sequence_of_tile(const Params& p, int tile) {
  const SequenceParams& s = p.sequences;
  constexpr int of_query = SIDE == QUERIES ? INNER_HEADS : 1; // rows
  u32 first = 0, count = u32(s.sequences) + 1;
  #pragma unroll 1
  while (count > 1) {
    const u32 step = (count + 31) / 32;
    Regs<bool, 1> is_before;
    for_lane(l) {
      const u32 number = first + l * step;
      is_before.at(l, 0) = l == 0;
      if (l > 0 && l * step < count) {
        const int row = read_length(s, offsets_of<SIDE>(p), SIDE == QUERIES ? OFFSETS_Q : OFFSETS_KV, number, rows_of_array<SIDE>(p) / of_query);
        is_before.at(l, 0) = row / (TILE_ROWS<SIDE> / of_query) + int(number) <= tile;
      }
    }
    const u32 ahead = u32(ones(warp_ballot(is_before)) - 1) * step;
    first += ahead;
    count = min_of(step, count - ahead);
  }
  return first;
}

// The first row of a tile of packed rows in its sequence; below 0 if the sequence does not have the tile.
template <Side SIDE> OP int row_in_sequence(const SequenceRows& rows, int tile) {
  const int row = (tile - rows.first_tile()) * TILE_ROWS<SIDE>;
  return row < rows.room ? row : -1;
}
template <Side SIDE, typename Params> OP int row_in_sequence(const Params& p, int tile, u32& number) {
  number = sequence_of_tile<SIDE>(p, tile);
  return row_in_sequence<SIDE>(rows_of_sequence<SIDE>(p, number), tile);
}

// Where a block of a grid of tiles is; `row` is below 0 if there is no such tile.
template <Side SIDE, typename Params> OP BlockCoord block_coord(const Params& p, int heads, u32 block = block_id()) {
  if constexpr (VARLEN) {
    if (offsets_of<SIDE>(p)) {
      const u32 tiles = tiles_of<SIDE>(p), head = block / tiles;
      BlockCoord here;
      here.head = int(head);
      here.row = row_in_sequence<SIDE>(p, int(tiles - 1 - (block - head * tiles)), here.batch_number);
      batch_element(here.batch, p.batch, here.batch_number);
      return here;
    }
  }
  return block_coord(p.batch, heads, rows_of_array<SIDE>(p), TILE_ROWS<SIDE>, block);
}
// The same of a block of the backward; `tile` is below 0 if there is none.
template <typename Params> OP KeyBlockCoord key_block_coord(const Params& p) {
  if constexpr (VARLEN) {
    if (offsets_of<KEYS>(p)) {
      const int one[BATCH_AXES] = {1, 1, 1, 1};
      KeyBlockCoord here = key_block_coord(one, p.heads, p.heads_per_kv, p.heads_per_block, tiles_of<KEYS>(p) * TILE_KV, TILE_KV, p.heads_together);
      const int row = row_in_sequence<KEYS>(p, here.tile, here.batch_number);
      here.tile = row < 0 ? -1 : row / TILE_KV;
      batch_element(here.batch, p.batch, here.batch_number);
      return here;
    }
  }
  return key_block_coord(p.batch, p.heads, p.heads_per_kv, p.heads_per_block, p.len_kv, TILE_KV, p.heads_together);
}

// Number of a tile of queries, over heads and what batch elements the array has.
template <typename Params> OP u32 query_tile_number(const Params& p, const Rows<QUERIES, Params>& queries, int head, int tile) {
  return (queries.batch_number() * p.heads + head) * tiles_of<QUERIES>(p) + queries.first_tile() + tile;
}

// CACHED: which element of a cache is that of a sequence; 0 for rows that belong to none.
template <typename Params> OP int element_of_cache(const Params& p, u32 number) {
  if constexpr (VARLEN) {
    const SequenceParams& s = p.sequences;
    if (number < u32(s.sequences)) return read_length(s, s.cache_batch, CACHE_BATCH, number, s.rows_of_cache - 1);
  }
  return 0;
}
// The batch element of keys and values of a sequence.
template <typename Params> OP void batch_of_keys(int (&batch)[BATCH_AXES], const Params& p, const BlockCoord& here) {
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) batch[i] = here.batch[i];
  if constexpr (VARLEN) {
    const SequenceParams& s = p.sequences;
    if (s.cache_batch && here.batch_number < u32(s.sequences))
      batch[BATCH_AXES - 1] = read_length(s, s.cache_batch, CACHE_BATCH, here.batch_number, s.rows_of_cache - 1);
  }
}

// Rows that are no queries become what a row is that sees nothing, whatever they are.
template <int M, int D> OP void clear_rows(Acc<M, D>& o, RowVec<M>& lse, int rows) {
  fill_from(o, rows, 0.f);
  fill_from(lse, rows, -infinity());
}

// Keys, or values, in pages: row i is in page number i / page of those of its sequence.
struct PagedTile {
  Element* base;                                              // of the head, in page 0
  i64 page_stride, row_stride, col_stride;
  const SequenceParams* of;
  i64 first_page;                                             // where the sequence's pages begin among all
  int row0, rows, cols;                                       // as a GlobalTile: the first row, and how many there are from there on
  OP PagedTile from_row(int row) const {
    PagedTile tile = *this;
    tile.row0 += row, tile.rows -= row;
    return tile;
  }
  // where a row begins that exists: no entry beyond is read
  OP i64 offset(int row) const {
    const int key = row0 + row, number = int(divide(key, of->page_divmod));
    const i64 page = read_length(*of, of->pages, PAGES, first_page + number, of->rows_of_cache - 1);
    return page * page_stride + (key - number * int(of->page_divmod.divisor)) * row_stride;
  }
  OP int page_of(int row) const {
    return read_length(*of, of->pages, PAGES, first_page + int(divide(row0 + row, of->page_divmod)), of->rows_of_cache - 1);
  }
  // the same rows from one on, if all that are asked for lie in the page of that one, which is `page` of the array
  OP GlobalTile in_page(int row, int page) const {
    const int key = row0 + row, in_page = key - int(divide(key, of->page_divmod) * of->page_divmod.divisor);
    return {base + page * page_stride + in_page * row_stride, row_stride, col_stride, rows - row, cols};
  }
};
using KeySlice = Choose<PAGED, PagedTile, GlobalTile>;

// The keys of a sequence, or its values, of one head.
template <bool IN_PAGES = PAGED, typename Params>
OP Choose<IN_PAGES, PagedTile, GlobalTile> key_slice(const Params& p, const Tensor& t, const int (&batch)[BATCH_AXES], int head_kv, const Sequence<Params>& seq, u32 number, int cols) {
  if constexpr (IN_PAGES) {
    const SequenceParams& s = p.sequences;
    return {static_cast<Element*>(t.data) + head_kv * t.head_stride, &t == &p.k ? s.k_page_stride : s.v_page_stride, t.row_stride, t.col_stride,
            &s, i64(number) * s.pages_of_sequence, 0, seq.kv.len(), cols};
  } else {
    return slice(t, batch, head_kv, seq.kv.first(), seq.kv.end(), cols);
  }
}

// tile = src, as of rows that lie in a line. A warp brings neighbouring rows, and each lane finds one of them for all: a granule so takes a
// handful of instructions, where its own search for the page would take forty, more than the products of a few queries with it.
template <typename Scope, int ROWS, int WIDTH> OP void load_async(SharedTile<ROWS, WIDTH> tile, const PagedTile& src) {
  if constexpr (Scope::threads == 32) sync_warp();            // without it a lane overwrites what its neighbours still read there
  constexpr int per_row = WIDTH / GRANULE, rows = ceil_div(ROWS, Scope::threads / 32), granules = rows * per_row;
  static_assert(rows <= 32, "a lane finds one");
  constexpr int AT_ONCE = per_row > 48 ? 1 : per_row % 8 ? 2 : 4;    // where a warp's granules lie otherwise in each pass, more would spill
  const int first = Scope::thread(0) / 32 * rows, exist = min_of(ROWS, src.rows) - first;
  Regs<i64, 1> offset;
  for_lane(l) offset.at(l, 0) = l < min_of(rows, exist) ? src.offset(first + l) : 0;
  for_lane(l) {
    #pragma unroll (AT_ONCE)
    for (int i = l; i < ceil_div(granules, 32) * 32; i += 32) {
      const int row = i / per_row, col = i % per_row * GRANULE;
      const Element* const from = src.base + value_of_lane(offset, row % 32) + col * src.col_stride;
      if ((granules % 32 == 0 || i < granules) && (ROWS % rows == 0 || first + row < ROWS))
        copy_granule(tile.at(first + row, col), from, row < exist && col < src.cols);
    }
  }
}

// key_places.cuh -- where the keys of a block of a backward for sm_90a lie, of sequences of their own lengths (VARLEN). The search for a sequence
// and the reads of its offsets and lengths wait for each other, and a multiprocessor has one block at a time, which would wait for all of them.
// So the launch before finds the place of each key tile, once for all heads and warps, and a block reads that alone.
//
//   bwd_hopper_preprocess    key_places[j] = where key tile j lies      a warp for each, in blocks before those of query tiles
//   bwd_hopper               place = key_places[j]
//
// Sequences with most queries come first there, since their blocks take longest: at the end, short ones fill what others leave idle.
#pragma once
#include "tile/sequence.cuh"

// Key tiles that the array has room for: of packed keys, counted over all sequences.
OP u32 key_places(const HopperBackwardParams& p) {
  int elements = 1;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) elements *= offsets_of<KEYS>(p) ? 1 : p.batch[i];
  return tiles_of<KEYS>(p) * elements;
}
// Blocks of the launch before that find their places.
OP u32 place_blocks(const HopperBackwardParams& p) { return VARLEN ? ceil_div(int(key_places(p)), WARPS) : 0; }

// What a block keeps of its place: without VARLEN nothing, and all that is asked is what the kernel was told.
struct NoPlace {};
using KeptPlace = Choose<VARLEN, KeyPlace, NoPlace>;

// The query tiles of a head that see a key of the block, and how many these are of so many heads.
struct QueryTiles {
  int first, last, count;
};
OP QueryTiles query_tiles(const NoPlace&, const TransposedMask& mask, int row0, int heads) {
  const ColumnRange seeing = visible_queries(mask, row0, TILE_KV);
  const int first = seeing.first / TILE_Q, last = seeing.last / TILE_Q;
  return {first, last, seeing.last < seeing.first ? 0 : (last + 1 - first) * heads};
}
OP QueryTiles query_tiles(const KeyPlace& of, const TransposedMask&, int, int heads) { return {of.first, of.first + of.count - 1, of.count * heads}; }

// Where a tile of packed keys comes among the places: sequences with more queries first, and the tiles of each in a line. By a warp for itself, which
// asks all sequences, so that many would keep it busy for long. If offsets fall, which they may not, tiles stay where they are.
constexpr u32 MOST_SORTED = 1024;                             // sequences
template <typename Params> OP u32 longest_first(const Params& p, u32 tile, u32 sequence) {
  const u32 sequences = u32(p.sequences.sequences);
  if (sequence >= sequences || sequences > MOST_SORTED) return tile;
  const int queries = rows_of_sequence<QUERIES>(p, sequence).len(), first_tile = rows_of_sequence<KEYS>(p, sequence).first_tile();
  Regs<int, 1> before;
  Regs<bool, 1> falls;
  for_lane(l) {
    before.at(l, 0) = 0, falls.at(l, 0) = int(tile) < first_tile; // of rows before all sequences
    #pragma unroll 1
    for (u32 other = l; other < sequences; other += 32) {
      const int tiles = rows_of_sequence<KEYS>(p, other + 1).first_tile() - rows_of_sequence<KEYS>(p, other).first_tile();
      const int of_other = rows_of_sequence<QUERIES>(p, other).len();
      falls.at(l, 0) |= tiles < 1;
      if (of_other > queries || (of_other == queries && other < sequence)) before.at(l, 0) += tiles;
    }
  }
  if (warp_any(falls)) return tile;
  reduce_lanes<32>(before, [](int a, int b) { return a + b; });
  return u32(rows_of_sequence<KEYS>(p, 0).first_tile() + value_of_lane(before, 0) + int(tile) - first_tile);
}

// The same of padded ones: the batch element in whose place a sequence comes, with all of its tiles.
template <typename Params> OP u32 longest_element_first(const Params& p, u32 element, u32 elements) {
  if (elements > MOST_SORTED) return element;
  const int queries = rows_of_sequence<QUERIES>(p, element).len();
  Regs<int, 1> before;
  for_lane(l) {
    before.at(l, 0) = 0;
    #pragma unroll 1
    for (u32 other = l; other < elements; other += 32) {
      const int of_other = rows_of_sequence<QUERIES>(p, other).len();
      before.at(l, 0) += of_other > queries || (of_other == queries && other < element);
    }
  }
  reduce_lanes<32>(before, [](int a, int b) { return a + b; });
  return u32(value_of_lane(before, 0));
}

// One of these blocks. A tile without keys is seen by no query, whatever the mask says.
template <typename Params> OP void find_places(const Params& p) {
  if constexpr (VARLEN) {
    const u32 number = block_id() * WARPS + warp_id(), tiles = tiles_of<KEYS>(p);
    if (number >= key_places(p)) return;
    const bool packed = offsets_of<KEYS>(p);
    const u32 batch_number = packed ? sequence_of_tile<KEYS>(p, int(number)) : number / tiles;
    const auto seq = sequence_of(p, batch_number);
    const int row = packed ? row_in_sequence<KEYS>(seq.kv, int(number)) : int(number - batch_number * tiles) * TILE_KV;
    const int key_tiles = ceil_div(seq.kv.len(), TILE_KV);
    int tile = row < 0 ? -1 : row / TILE_KV;
    if (p.backwards && u32(tile) < u32(key_tiles)) tile = key_tiles - 1 - tile;         // then of all heads; -1 stays, where there is no tile
    const TransposedMask mask = transposed(seq.mask(), seq.q.len(), seq.kv.len());
    const QueryTiles seeing = query_tiles(NoPlace{}, mask, tile * TILE_KV, 1);
    int batch[BATCH_AXES];
    batch_element(batch, p.batch, batch_number);

    KeyPlace place;
    place.left = mask.left, place.right = mask.right, place.prefix = mask.prefix;
    place.len_q = mask.len_q, place.len_kv = mask.len_kv;
    place.begin_q = seq.q.first(), place.room_q = seq.q.room;
    place.begin_kv = seq.kv.first(), place.room_kv = seq.kv.room;
    place.first_number = query_tile_number(p, seq.q, 0, 0);
    place.batch_number = batch_number;
    place.batch[0] = batch[BATCH_AXES - 2], place.batch[1] = batch[BATCH_AXES - 1];     // of more, TMA would not tell them apart
    place.tile = tile;
    place.first = seeing.first;
    place.count = tile >= 0 && tile < key_tiles ? seeing.count : 0;
    const u32 at = packed ? longest_first(p, number, batch_number) : longest_element_first(p, batch_number, key_places(p) / tiles) * tiles + number % tiles;
    for_lane(l) {
      if (l == 0) {
        count_written(sizeof place);
        p.key_places[at] = place;
      }
    }
  }
}

// By a block of keys: `here` says which tile it is for, and then where that lies.
OP void take_place(KeyBlockCoord& here, const KeyPlace& place) {
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) here.batch[i] = i < BATCH_AXES - 2 ? 0 : place.batch[i - (BATCH_AXES - 2)];
  here.batch_number = place.batch_number;
  here.tile = place.tile;
}
OP void read_place(NoPlace&, const HopperBackwardParams&, KeyBlockCoord&) {}
OP void read_place(KeyPlace& place, const HopperBackwardParams& p, KeyBlockCoord& here) {
  count_read(sizeof place);
  place = p.key_places[here.batch_number * tiles_of<KEYS>(p) + here.tile];
  take_place(here, place);
}

OP TransposedMask mask_of_place(const NoPlace&, const HopperBackwardParams& p) { return transposed(p.mask, p.len_q, p.len_kv); }
OP TransposedMask mask_of_place(const KeyPlace& of, const HopperBackwardParams&) { return {of.left, of.right, of.len_q, of.len_kv, of.prefix}; }

OP u32 first_number_of(const NoPlace&) { return 0; }
OP u32 first_number_of(const KeyPlace& of) { return of.first_number; }

template <typename Params>
OP UniformSequence<Params> sequence_of_place(const NoPlace&, const Params& p, u32 number) { return {{p, number}, {p, number}}; }
// Which tiles its queries have, a block knows by `first_number`.
template <typename Params> OP VarlenSequence<Params> sequence_of_place(const KeyPlace& of, const Params& p, u32) {
  const bool packed = offsets_of<KEYS>(p);
  const SequenceRows queries{of.begin_q, of.len_q, of.room_q, 0, 0};
  const int tile0 = packed ? of.begin_kv / TILE_KV + int(of.batch_number) : 0;
  const SequenceRows keys{of.begin_kv, of.len_kv, of.room_kv, packed ? 0 : of.batch_number, tile0};
  VarlenSequence<Params> seq{queries, keys, p.mask};
  seq.moved_mask.left = -of.right, seq.moved_mask.right = -of.left, seq.moved_mask.prefix = of.prefix;
  return seq;
}

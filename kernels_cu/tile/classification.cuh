// classification.cuh -- in which tiles of pairs any takes part, and in which all do: bits of tile_list.cuh; and PAIR_BITS, which pairs of a tile do where
// neither holds: words of pair_bits.cuh. See classify.cu.
#pragma once
#include "tile/pair_bits.cuh"
#include "tile/score.cuh"
#include "tile/tile_list.cuh"

enum Found : u32 { NO_PAIR = 0, SEEN = 1, MASKED = 2, UNKNOWN = 4 }; // a pair that takes part; one that does not; or pairs have to be asked
constexpr int TILES = 8, BYTES = 4;                           // of a block: a byte of a word; so many of these
constexpr int COMPARED_ROWS = MASK_IN_LOOP ? 2 : 8;           // that lanes go through before they compare what they have found

// By one warp: what there is among the pairs of these queries and keys that exist, as far as intervals tell, of all pairs at once. PAIR_BITS: a pair
// that MaskParams hides, or that does not exist, is masked as well, since kernels ask nothing else.
OP u32 classify_by_intervals(const ClassifyParams& p, const ScoreContext& x, const Mask& mask, int row0, int col0) {
  const int rows = min_of(row0 + p.tile_q, p.len_q), cols = min_of(col0 + p.tile_kv, p.len_kv);
  const u32 shown = visible_keys(mask, row0, rows - row0).overlaps(col0, cols - col0) ? SEEN : NO_PAIR;
  if (PAIR_BITS && !shown) return MASKED;
  const Interval<bool> take = takes_part_in(TilePlace{{row0, rows - 1}, {col0, cols - 1}}, x);
  if (!take.high) return MASKED;
  const bool whole = !PAIR_BITS || (row0 + p.tile_q <= p.len_q && unmasked_keys(mask, row0, p.tile_q).contains(col0, p.tile_kv));
  return take.low && whole ? shown : UNKNOWN | shown;
}

// The same of 16 rows of a tile, whose words it writes. BY_KEYS: rows are keys.
template <bool BY_KEYS> OP u32 classify_pairs(const ClassifyParams& p, const ScoreContext& x, const Mask& mask, char* words, int row0, int tile) {
  const int cols = BY_KEYS ? p.tile_q : p.tile_kv, col0 = tile * cols;
  const u32 rows = p.tiles_divmod.divisor * (BY_KEYS ? p.tile_kv : p.tile_q);
  const u32 place = PairMatrix{list_number(x.of.tiles, x.b, x.h), rows, u32(p.others)}.place(row0, tile);
  // Whether a pair takes part. Without branches, so that reads of all pairs are on their way at once.
  const auto takes = [&](int row, int col) {
    PairPlace at{BY_KEYS, BY_KEYS ? col : row, BY_KEYS ? row : col, float(row), float(col), 0.f, 0.f, true};
    read_arrays(at, x);
    const bool by_expression = takes_part(at, x);
    const ColumnRange keys = visible_in_row(mask, at.q_idx);
    return by_expression && at.q_idx < p.len_q && keys.first <= at.kv_idx && at.kv_idx <= keys.last;
  };
  Regs<u64, 1> bits;
  for_lane(l) bits.at(l, 0) = 0;
  if constexpr (BY_KEYS) {                                    // lanes are queries, of which there is most to be read
    #pragma unroll 1
    for (int col = 0; col < cols; col += 32) {
      Regs<u32, 1> of_query;                                  // a bit for each row
      Regs<u32, 2> of_rows;                                   // those of the lane's fragment, a bit for each of 32 queries
      for_lane(l) {
        of_query.at(l, 0) = 0;
        #pragma unroll (MASK_IN_LOOP ? 1 : 16)
        for (int row = 0; row < 16; ++row) of_query.at(l, 0) |= u32(takes(row0 + row, col0 + col + l) && col + l < cols) << row;
      }
      #pragma unroll
      for (int row = 0; row < 16; ++row) {
        Regs<bool, 1> of_row;
        for_lane(l) of_row.at(l, 0) = of_query.at(l, 0) >> row & 1;
        const u32 seen = warp_ballot(of_row);
        for_lane(l) if (l / 4 == row % 8) of_rows.at(l, row / 8) = seen;
      }
      for_lane(l) {
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 seen = of_rows.at(l, i) >> l % 4 * 2;     // two columns of each eight
          bits.at(l, 0) |= u64((seen & 3) | (seen >> 4 & 0x30) | (seen >> 8 & 0x300) | (seen >> 12 & 0x3000)) << (col / 2 + 2 * i);
        }
      }
    }
  } else {
    using Block = Acc<16, 8>;                                 // four registers of each lane
    for_lane(l) {
      #pragma unroll (MASK_IN_LOOP ? 1 : 4)
      for (int col = 0; col < cols; col += 8) {
        #pragma unroll
        for (int r = 0; r < Block::regs; ++r) bits.at(l, 0) |= u64(takes(row0 + Block::row(l, r), col0 + col + Block::col(l, r))) << (col / 2 + r);
      }
    }
  }
  Regs<bool, 1> seen, masked;
  for_lane(l) {
    const u64 of_lane = bits.at(l, 0);
    count_written(bytes_of_pair_word(cols));
    if (cols <= 64) reinterpret_cast<u32*>(words)[place + l] = u32(of_lane);
    else reinterpret_cast<u64*>(words)[place + l] = of_lane;
    seen.at(l, 0) = of_lane != 0, masked.at(l, 0) = of_lane != ~u64(0) >> (64 - cols / 2);
  }
  return (warp_any(seen) ? SEEN : 0) | (warp_any(masked) ? MASKED : 0);
}

// By one warp, where nobody reads pairs: what there is. Where intervals do not tell, the warp looks at pairs, a few queries and 32 keys at a time, and
// no further once it has seen one of each kind that there may be. It begins with queries from both ends of the tile, which differ in a tile that
// something ends in.
OP u32 classify_tile(const ClassifyParams& p, const ScoreContext& x, const Mask& mask, int row0, int col0) {
  const u32 at_once = classify_by_intervals(p, x, mask, row0, col0), shown = at_once & SEEN;
  if (!(at_once & UNKNOWN)) return at_once;
  const int rows = min_of(row0 + p.tile_q, p.len_q), cols = min_of(col0 + p.tile_kv, p.len_kv);
  Regs<bool, 1> seen, masked;
  for_lane(l) seen.at(l, 0) = masked.at(l, 0) = false;
  const int steps = ceil_div(rows - row0, COMPARED_ROWS);
  u32 found = NO_PAIR;
  #pragma unroll 1
  for (int step = 0; step < steps && found != (shown | MASKED); ++step) {
    // a row of each part, or the last one again, rather than none: all reads are on their way at once
    const auto row = [&](int i) {
      const int of_half = i % (COMPARED_ROWS / 2) * steps + step;
      return i < COMPARED_ROWS / 2 ? min_of(row0 + of_half, rows - 1) : max_of(rows - 1 - of_half, row0);
    };
    ColumnRange keys[COMPARED_ROWS];
    #pragma unroll
    for (int i = 0; i < COMPARED_ROWS; ++i) keys[i] = visible_in_row(mask, row(i));
    for_lane(l) {
      #pragma unroll 1
      for (int kv_idx = col0 + l; kv_idx < cols; kv_idx += 32) {
        #pragma unroll
        for (int i = 0; i < COMPARED_ROWS; ++i) {
          const int q_idx = row(i);
          PairPlace at{false, q_idx, kv_idx, float(q_idx), float(kv_idx), 0.f, 0.f, true};
          read_arrays(at, x);
          const bool takes = takes_part(at, x);
          if (!takes) masked.at(l, 0) = true;
          else if (keys[i].first <= kv_idx && kv_idx <= keys[i].last) seen.at(l, 0) = true;
        }
      }
    }
    found = (warp_any(seen) ? SEEN : 0) | (warp_any(masked) ? MASKED : 0);
  }
  return found;
}

// Which tiles of a block are UNKNOWN, a bit for each.
OP u32 unknown_tiles(SharedAddress found) {
  Regs<bool, 1> unknown;
  for_lane(l) unknown.at(l, 0) = l < TILES && load_shared<u32>(found + l * int(sizeof(u32))) & UNKNOWN;
  return warp_ballot(unknown);
}
// A byte of each row of a list, from what was found of the tiles, and of so many parts of those that are UNKNOWN.
OP void write_bytes(unsigned char* any_byte, unsigned char* all_byte, SharedAddress found, int parts) {
  Regs<bool, 1> any, all;
  for_lane(l) {
    u32 of_tile = l < TILES ? load_shared<u32>(found + l * int(sizeof(u32))) : u32(MASKED);
    if (of_tile & UNKNOWN) {
      of_tile = NO_PAIR;
      #pragma unroll 1
      for (int part = 1; part <= parts; ++part) of_tile |= load_shared<u32>(found + (TILES * part + l) * int(sizeof(u32)));
    }
    any.at(l, 0) = of_tile & SEEN;
    all.at(l, 0) = !(of_tile & MASKED);
  }
  const u32 any_bits = warp_ballot(any), all_bits = warp_ballot(all);
  for_lane(l) if (l == 0) {
    count_written(2);
    *any_byte = static_cast<unsigned char>(any_bits), *all_byte = static_cast<unsigned char>(all_bits);
  }
}

// A word of a column: bit `bit` of word number `word` of 32 lists, those before number `end`.
OP void write_column(u32* column, const u32* lists, int words, int word, int bit, int first, int end) {
  Regs<bool, 1> sees;
  for_lane(l) sees.at(l, 0) = first + l < end && read_bits(lists + i64(first + l) * 2 * words + word) >> bit & 1;
  const u32 bits = warp_ballot(sees);
  for_lane(l) if (l == 0) {
    count_written(sizeof(u32));
    *column = bits;
  }
}

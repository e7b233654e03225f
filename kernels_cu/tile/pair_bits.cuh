// pair_bits.cuh -- which pairs of a tile take part, as bits (PAIR_BITS). classify.cu asks a mask for them before, once for all batch elements and
// heads that it does not tell apart; kernels read them, and know nothing of the mask.
//
// 16 rows of a tile have a word for each lane of a warp, and the word a bit for each register of the lane's fragment of 16 x COLS scores. Rows are
// queries and columns keys, of a tile of the backward the other way round. Tiles in which all pairs take part, or none, have words that nobody
// writes or reads.
#pragma once
#include "tile/tile_list.cuh"

template <int COLS> using PairWord = Choose<COLS <= 64, u32, u64>;
OP int bytes_of_pair_word(int cols) { return cols <= 64 ? sizeof(u32) : sizeof(u64); }
// Behind lists of so many words in all.
OP char* pair_words(u32* lists, u32 words) { return reinterpret_cast<char*>(lists + (words + 31) / 32 * 32); }

// Where those of a matrix of pairs are: of 16 rows from row0 on, and a tile of columns, 32 words. There are fewer than 2^32, see pair_bits.py.
struct PairMatrix {
  u32 number;                                                 // of those that a mask tells apart
  u32 rows, tiles;                                            // rows of whole lists, and tiles of columns
  OP u32 place(u32 row0, u32 tile) const {
    const u32 parts = rows / 16;                              // the last one also for warps beyond all lists
    return ((number * parts + min_of(row0 / 16, parts - 1)) * tiles + tile) * 32;
  }
};
template <int COLS> OP void read_pairs(Regs<PairWord<COLS>, 1>& bits, const char* words, const PairMatrix& matrix, u32 row0, u32 col0) {
  const u32 place = matrix.place(row0, col0 / COLS);
  for_lane(l) {
    count_read(sizeof(PairWord<COLS>));
    bits.at(l, 0) = reinterpret_cast<const PairWord<COLS>*>(words)[place + l];
  }
}

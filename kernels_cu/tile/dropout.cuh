// dropout.cuh -- dropout whose random bits follow from where a pair is and from nothing else: seed, offset, batch element, head, query and
// key. So every kernel, tile size and machine drops the same pairs, and a backward draws again what its forward drew.
// (Philox4x32-10: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".)
//
//   key of Philox   (seed_low, seed_high)
//   counter         (key / 16 * 8 + key % 8, query / 16 * 8 + query % 8, batch * heads + head, offset)
//   word of a pair  2 * (query / 8 % 2) + key / 8 % 2, of the four that come out; the pair is dropped if it is below the threshold
//
// Four pairs so share what is drawn, queries 8 apart and keys 8 apart. A lane has all four, whether queries are the rows of a fragment or
// its columns.
#pragma once
#include "params.cuh"
#include "tile/fragment.cuh"

// What a kernel drops, and with PLACED where among the pairs that are numbered its first one is; `seeded` in tile/score.cuh makes it.
struct Dropping : DropoutParams {
  u32 first_query, first_key, first_head;                     // the first two multiples of 16
};
OP u32 first_query(const DropoutParams&) { return 0; }
OP u32 first_query(const Dropping& dropout) { return PLACED ? dropout.first_query : 0; }
OP u32 first_key(const DropoutParams&) { return 0; }
OP u32 first_key(const Dropping& dropout) { return PLACED ? dropout.first_key : 0; }
OP u32 first_head(const DropoutParams&) { return 0; }
OP u32 first_head(const Dropping& dropout) { return PLACED ? dropout.first_head : 0; }

struct RandomWords {
  u32 x[4];
};

// A product of 64 bits, both halves of which are needed, is one instruction of a GPU. Rounds in which a word is that of the query or the
// key alone are computed once for all that share it, because a compiler sees that they are the same.
OP RandomWords philox4x32_10(u32 x0, u32 x1, u32 x2, u32 x3, u32 key0, u32 key1) {
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = u64(x0) * 0xd2511f53u, product1 = u64(x2) * 0xcd9e8d57u;
    x0 = u32(product1 >> 32) ^ (x1 ^ key0), x1 = u32(product1);
    x2 = u32(product0 >> 32) ^ (x3 ^ key1), x3 = u32(product0);
    key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;                 // golden ratio and square root of 3
  }
  return {{x0, x1, x2, x3}};
}

// Elements of pairs that are kept are multiplied by the scale, those of pairs that are dropped become 0: by selection, whatever they were.
// The fragment starts at row0 and col0, multiples of 16. Rows are queries and columns keys, or TRANSPOSED the other way round.
template <bool TRANSPOSED, int M, int N, typename Dropout>
OP void drop(Acc<M, N>& x, const Dropout& dropout, u32 batch_head, int first_row, int first_col) {
  // Not ahead, or rounds of Philox that a row decides would be kept for all key tiles.
  const int row0 = not_ahead(first_row) + int(TRANSPOSED ? first_key(dropout) : first_query(dropout));
  const int col0 = first_col + int(TRANSPOSED ? first_query(dropout) : first_key(dropout));
  batch_head += first_head(dropout);
  static_assert(M % 16 == 0 && N % 16 == 0, "four pairs that share what is drawn are in one fragment");
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 16; ++i) {
      #pragma unroll
      for (int j = 0; j < N / 8; ++j) {                       // of 16 columns the even ones of a lane, then the odd ones
        const u32 row = u32(row0) / 2 + 8 * i + l / 4, col = u32(col0) / 2 + j / 2 * 8 + l % 4 * 2 + j % 2;
        const RandomWords words = philox4x32_10(TRANSPOSED ? row : col, TRANSPOSED ? col : row, batch_head, dropout.offset,
                                                dropout.seed_low, dropout.seed_high);
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int lower = TRANSPOSED ? word % 2 : word / 2, right = TRANSPOSED ? word / 2 : word % 2;
          float& element = x.at(l, x.reg(2 * i + lower, j / 2 * 4 + 2 * right + j % 2));
          element = words.x[word] >= dropout.threshold ? element * dropout.scale : 0.f;
        }
      }
    }
  }
}

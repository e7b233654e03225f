// dropout.cuh -- dropout whose random bits follow from where a pair is and from nothing else: seed, offset, batch element, head, query and
// key. So every kernel, tile size and machine drops the same pairs, and a backward draws again what its forward drew.
// (Philox: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".)
//
//   a, b, c         the first three words of Philox4x32-7, whose key is the seed and whose counter is (offset, 0, 0, 0)
//   x, y            of Philox2x32-7, whose key is a + batch * heads + head and whose counter is
//                   (b + query / 32 * 8 + query % 2 * 4 + query % 8 / 2, c + key / 32 * 4 + key % 8 / 2)
//   if query / 16 is odd:  x += 0x165667b1 y, y += 0x165667b1 x
//   if key / 16 is odd:    x += 0x85ebca6b y, y += 0x85ebca6b x
//   words           x, y, z = x + 0xc2b2ae35 y, y + 0xc2b2ae35 z
//   word of a pair  2 * (query / 8 % 2) + key / 8 % 2; of that the lower half if the key is even, or the upper one
//
// A pair is dropped if the lower 15 bits of its half are below the threshold. So 32 pairs share 64 bits: of queries those 8, 16 and 24 apart,
// of keys as well, and two neighbours. Any two of the 16 words are independent, but for at most their four lowest bits, and
// tests/test_dropout.py counts which of 16 pairs are dropped together. Where queries are the rows of a fragment, a lane has all pairs of 16
// queries in 32 columns. Where they are its columns, a lane has one of the neighbouring keys, but two neighbouring queries: it draws for one,
// and has the other from the lane of the other key.
#pragma once
#include "params.cuh"
#include "tile/shared.cuh"

// What a kernel drops, and what keys and counters begin with.
struct Dropping {
  u32 thresholds;                                             // in both halves of a word
  float scale;
  u32 key, query, kv;
};
struct RandomWords {
  u32 x[4];
};
struct TwoWords {
  u32 x, y;
};

// A product of 64 bits, both halves of which are needed, is one instruction of a GPU.
OP RandomWords philox4x32_7(u32 x0, u32 x1, u32 x2, u32 x3, u32 key0, u32 key1) {
  #pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 product0 = u64(x0) * 0xd2511f53u, product1 = u64(x2) * 0xcd9e8d57u;
    x0 = u32(product1 >> 32) ^ (x1 ^ key0), x1 = u32(product1);
    x2 = u32(product0 >> 32) ^ (x3 ^ key1), x3 = u32(product0);
    key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;                 // golden ratio and square root of 3
  }
  return {{x0, x1, x2, x3}};
}
// The first product, which is of the query alone, is computed once for all that share it, because a compiler sees that they are the same.
OP TwoWords philox2x32_7(u32 x0, u32 x1, u32 key) {
  #pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 product = u64(x0) * 0xd256d193u;
    x0 = u32(product >> 32) ^ (x1 ^ key), x1 = u32(product);
    key += 0x9e3779b9u;
  }
  return {x0, x1};
}
OP TwoWords mixed(TwoWords drawn, u32 by) {
  drawn.x += by * drawn.y;
  drawn.y += by * drawn.x;
  return drawn;
}
// The four words of 16 x 16 pairs, whose first query and key are odd or even multiples of 16.
OP RandomWords words_of(TwoWords drawn, u32 odd_query, u32 odd_key) {
  drawn = mixed(mixed(drawn, odd_query * 0x165667b1u), odd_key * 0x85ebca6bu);
  const u32 third = drawn.x + 0xc2b2ae35u * drawn.y;
  return {{drawn.x, drawn.y, third, drawn.y + 0xc2b2ae35u * third}};
}

OP Dropping dropping(const DropoutParams& of) {
  const RandomWords words = philox4x32_7(of.offset, 0, 0, 0, of.seed_low, of.seed_high);
  return {of.threshold * 0x10001u, of.scale, words.x[0], words.x[1], words.x[2]};
}
// The same kept once for a warp, see `uniform`: where lanes have no registers for it.
template <typename T> OP T once_a_warp(const T& x) { return {x.thresholds, x.scale, uniform(x.key), uniform(x.query), uniform(x.kv)}; }

// Calls use(lane, block, words) with what each lane draws for each 16 x 16 elements of a fragment, whose blocks are numbered row by row. It
// starts at row0 and col0, multiples of 16, and col0 of 32 if N is. Rows are queries and columns keys, or TRANSPOSED the other way round.
template <bool TRANSPOSED, int M, int N, typename Use>
OP void for_words(const Dropping& dropout, u32 batch_head, int first_row, int first_col, Use use) {
  static_assert(M % 16 == 0 && N % 16 == 0, "pairs of which a lane has four words are in one fragment");
  constexpr int BESIDE = N % 32 == 0 ? 2 : 1;                 // blocks that one drawing is for
  // Not ahead, or what a row decides would be kept for all key tiles.
  const u32 row0 = not_ahead(first_row), col0 = first_col;
  for_lane(l) {
    #pragma unroll
    for (int block = 0; block < M / 16 * (N / 16); block += BESIDE) {
      const u32 row = row0 + block / (N / 16) * 16, col = col0 + block % (N / 16) * 16;
      const u32 query = TRANSPOSED ? col / 32 * 8 + l % 8 : row / 32 * 8 + l / 4 % 2 * 4 + l / 8;
      const u32 kv = TRANSPOSED ? row / 32 * 4 + l / 8 : col / 32 * 4 + l % 4;
      const TwoWords drawn = philox2x32_7(dropout.query + query, dropout.kv + kv, dropout.key + batch_head);
      #pragma unroll
      for (int i = 0; i < BESIDE; ++i) {
        const u32 odd_row = row / 16 % 2, odd_col = BESIDE == 2 ? i : col / 16 % 2;
        use(l, block + i, words_of(drawn, TRANSPOSED ? odd_col : odd_row, TRANSPOSED ? odd_row : odd_col));
      }
    }
  }
}
// Bits 15 and 31: whether the halves of a word keep their pairs. A difference of 15 bits leaves the bit above them set, if it is not below 0.
OP u32 kept_halves(const Dropping& dropout, u32 word) { return ((word | 0x80008000u) - dropout.thresholds) & 0x80008000u; }

// Which pairs of a fragment are kept, a bit each: eight for each 16 x 16 elements, of which four share a register.
template <bool TRANSPOSED, int M, int N> struct KeptPairs : Regs<u32, ceil_div(M / 16 * (N / 16), 4)> {
  typedef Acc<M, N> Elements;
  static constexpr int size = ceil_div(M / 16 * (N / 16), 4);
  static OP constexpr int block(int r) { return Elements::slot(r) / 2 * (N / 16) + Elements::col_slot(r) / 4; }
  static OP constexpr int bit(int r) {
    const int lower = Elements::slot(r) % 2, right = Elements::col_slot(r) / 2 % 2;
    return block(r) % 4 * 4 + (TRANSPOSED ? 2 * right + lower : 2 * lower + right) + Elements::col_slot(r) % 2 * 16;
  }
  OP bool has(int lane, int r) const { return this->at(lane, block(r) / 4) >> bit(r) & 1; }
};
// Lower halves are of even keys so far; they become those of even queries.
template <int N> OP void even_queries_low(Regs<u32, N>& kept) {
  Regs<u32, N> other = kept;
  exchange_lanes<4>(other);
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      const u32 own = kept.at(l, i), received = other.at(l, i);
      kept.at(l, i) = l / 4 % 2 ? received >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | received << 16;
    }
  }
}
// Nothing here waits for the elements.
template <bool TRANSPOSED, int M, int N>
OP void draw(KeptPairs<TRANSPOSED, M, N>& kept, const Dropping& dropout, u32 batch_head, int row0, int col0) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < kept.size; ++i) kept.at(l, i) = 0;
  }
  for_words<TRANSPOSED, M, N>(dropout, batch_head, row0, col0, [&](int l, int block, const RandomWords& words) {
    #pragma unroll
    for (int word = 0; word < 4; ++word) kept.at(l, block / 4) |= kept_halves(dropout, words.x[word]) >> (15 - block % 4 * 4 - word);
    pin(kept);                                                // one block after the other: several at once take registers
  });
  if constexpr (TRANSPOSED) even_queries_low(kept);
}

// Elements of pairs that are dropped become 0, by selection, whatever they were. Who sums up the others multiplies the sum by the scale.
template <bool TRANSPOSED, int M, int N> OP void drop(Acc<M, N>& x, const KeptPairs<TRANSPOSED, M, N>& kept) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < x.regs; ++r) x.at(l, r) = kept.has(l, r) ? x.at(l, r) : 0.f;
  }
}
// The same of P as A operands of 16-bit elements, whose rows are queries: a word is for the two elements of a register. All bits of a half are
// set where its pair is kept. For thresholds up to 0x7c00: numbers of 15 bits are in the order of the float16 that have their bits, up to
// infinity, and what has more bits is not a number, which `geu` counts as above all.
// FROM_HALF: the threshold from one half of a register that a warp has once, which these instructions read, but not both halves of one.
template <bool FROM_HALF = false> OP u32 whole_halves(const Dropping& dropout, u32 word) {
#if ON_GPU
  u32 kept;
  if constexpr (FROM_HALF)
    asm("{ .reg .b32 bits, both; .reg .b16 half; abs.f16x2 bits, %1; cvt.u16.u32 half, %2; mov.b32 both, {half, half}; "
        "set.geu.u32.f16x2 %0, bits, both; }"
        : "=r"(kept) : "r"(word), "r"(dropout.thresholds));
  else
    asm("{ .reg .b32 bits; abs.f16x2 bits, %1; set.geu.u32.f16x2 %0, bits, %2; }" : "=r"(kept) : "r"(word), "r"(dropout.thresholds));
  return kept;
#else
  return (kept_halves(dropout, word) >> 15) * 0xffffu;
#endif
}
// For a forward, whose registers have room for whole masks. Neither in a loop nor pinned: a compiler then mixes all blocks of a tile into its
// exponentials. A loop is less code, but as many instructions, of which too few do not wait for each other, and was slower.
template <int N> OP void draw(OperandA<16> (&kept)[N], const Dropping& dropout, u32 batch_head, int row0, int col0) {
  for_words<false, 16, 16 * N>(dropout, batch_head, row0, col0, [&](int l, int block, const RandomWords& words) {
    #pragma unroll
    for (int word = 0; word < 4; ++word) kept[block].at(l, word / 2 + word % 2 * 2) = whole_halves(dropout, words.x[word]);
  });
}
// P as A operands, with DROPOUT what is left of it.
template <int N> OP void to_operands(OperandA<16> (&p)[N], const Acc<16, 16 * N>& s, const OperandA<16> (&kept)[N]) {
  to_operands(p, s);
  if constexpr (DROPOUT) {
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < N; ++i)
        #pragma unroll
        for (int r = 0; r < 4; ++r) p[i].at(l, r) &= kept[i].at(l, r);
    }
  }
}

#if ON_GPU
// The highest bits of two bytes, BYTE and the one two further, each in all bits of a half.
template <int BYTE> OP u32 prmt_signs(u32 x) {
  u32 halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(x), "n"(0xaa88 + BYTE * 0x1111));
  return halves;
}
#else
template <int BYTE> u32 prmt_signs(u32 x) { return (x >> (8 * BYTE + 7) & 0x10001u) * 0xffffu; }
#endif

// Which pairs of N A operands are kept, for a backward: their rows are keys. A bit each, since dK and dV leave no registers for whole masks. Four
// operands share a register, whose halves are for those of theirs.
template <int N> struct KeptHalves : Regs<u32, ceil_div(N, 4)> {
  static constexpr int size = ceil_div(N, 4);
  static OP constexpr int bit(int i, int r) { return (3 - i % 4) * 4 + r; }
  // all bits of a half of register r of operand i, where its pair is kept
  OP u32 whole(int lane, int i, int r) const {
    const u32 x = this->at(lane, i / 4) << (7 - bit(i, r) % 8);
    return bit(i, r) < 8 ? prmt_signs<0>(x) : prmt_signs<1>(x);
  }
};
// Beneath products that are on their way. Four blocks of pairs at once: instructions of one wait for each other, and two at once were slower.
template <int N> OP void draw(KeptHalves<N>& kept, const Dropping& dropout, u32 batch_head, int row0, int col0) {
  static_assert(N % 4 == 0, "four operands share a register");
  constexpr bool FULL = WIDTH <= 64;                          // no register is left
  const u32 odd_key = u32(row0) / 16 % 2, sum = dropout.key + batch_head, key = not_ahead(sum);
  for_lane(l) {
    const u32 kv = dropout.kv + u32(row0) / 32 * 4 + (FULL ? not_ahead(l) : l) / 8;
    u32 query = dropout.query + u32(col0) / 32 * 8 + l % 8;
    #pragma unroll
    for (int i = 0; i < kept.size; ++i) kept.at(l, i) = 0;
    #pragma unroll (2 / KeptHalves<N>::size)
    for (int round = 0; round < 2; ++round) {
      #pragma unroll
      for (int i = 0; i < kept.size; ++i) {
        const TwoWords drawn = philox2x32_7(query + i * 16, kv, key);
        #pragma unroll
        for (int odd_query = 0; odd_query < 2; ++odd_query) {
          const RandomWords words = words_of(drawn, odd_query, odd_key);
          kept.at(l, i) <<= 4;
          #pragma unroll
          for (int word = 0; word < 4; ++word) kept.at(l, i) |= whole_halves<FULL>(dropout, words.x[word]) & 0x10001u << word;
        }
      }
      query += 8;
    }
  }
  even_queries_low(kept);
  pin(kept);
}
// Half after half, in the order of their bits, of which a GPU then moves seven at once to predicates.
template <int N> OP void drop(Acc<16, 16 * N>& x, const KeptHalves<N>& kept) {
  for_lane(l) {
    #pragma unroll
    for (int half = 0; half < 2; ++half)
      #pragma unroll
      for (int i = N - 1; i >= 0; --i) {
        const u32 bits = kept.at(l, i / 4) >> (16 * half + kept.bit(i, 0));
        #pragma unroll
        for (int r = 0; r < 4; ++r) {
          float& own = x.at(l, x.reg(r % 2, i * 4 + r / 2 * 2 + half));
          own = bits & 1u << r ? own : 0.f;
        }
      }
  }
}

// dropout.cuh -- dropout whose random bits follow from where a pair is and from nothing else: seed, offset, batch element, head, query and
// key. So every kernel, tile size and machine drops the same pairs, and a backward draws again what its forward drew.
// (Philox: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3". pcg4d: Jarzynski and Olano, 2020, "Hash functions for GPU
// rendering".)
//
//   a, b, c, d      the words of Philox4x32-7, whose key is the seed and whose counter is (offset, 0, 0, 0)
//   x, y, z, w      what pcg4d makes of (b + query / 64 * 8 + query % 2 * 4 + query % 8 / 2, c + key / 64 * 4 + key % 8 / 2, a + batch * heads + head, d),
//                   but between its two rounds  y = y ^ f
//   f               0, ^ 0x9e3779b9 if query / 16 is odd, ^ 0x85ebca6b if query / 32 is
//   m               0x7feb352d, times 0x27d4eb2d if key / 16 is odd, times 0xc2b2ae3b if key / 32 is
//   words           p = x + m y, y + m z, z + m w, w + m p
//   word of a pair  2 * (query / 8 % 2) + key / 8 % 2; of that the lower half if the key is even, or the upper one
//
// A pair is dropped if the lower 15 bits of its half are below the threshold. So 128 pairs share one first round, of queries those that differ by
// multiples of 8, of keys as well, and two neighbours, among 64 x 64, and 32 of them a second one. tests/test_dropout.py counts which of 16 pairs
// are dropped together. Where queries are the rows of a fragment, a lane has all pairs of 16 queries in 64 columns. Where they are its columns, a
// lane has one of the neighbouring keys, but two neighbouring queries: it draws for one, and has the other from the lane of the other key.
#pragma once
#include "params.cuh"
#include "tile/shared.cuh"

// What a kernel drops, and what keys and counters begin with.
struct Dropping {
  u32 thresholds;                                             // in both halves of a word
  float scale;
  u32 key, query, kv, rest;
};
struct RandomWords {
  u32 x[4];
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
OP u32 pcg(u32 x) { return x * 1664525u + 1013904223u; }
// The first round of pcg4d, of words that have been multiplied by `pcg`, some of them once for many, and the second one, for which y changes by f.
// Products of 32 bits alone: beneath those of a warpgroup one of 64 bits takes several times as long.
OP RandomWords first_round(u32 x, u32 y, u32 z, u32 w) {
  x += y * w, y += z * x, z += x * y, w += y * z;
  return {{x ^ x >> 16, y ^ y >> 16, z ^ z >> 16, w ^ w >> 16}};
}
OP RandomWords second_round(const RandomWords& first, u32 f) {
  u32 x = first.x[0], y = first.x[1] ^ f, z = first.x[2], w = first.x[3];
  x += y * w, y += z * x, z += x * y, w += y * z;
  return {{x, y, z, w}};
}
// What tells 16 x 16 pairs of a drawing from each other, by which sixteen of 64 queries and of 64 keys they are of.
OP u32 change_of_queries(u32 of_queries) { return (of_queries & 1 ? 0x9e3779b9u : 0u) ^ (of_queries & 2 ? 0x85ebca6bu : 0u); }
constexpr u32 FACTOR = 0x7feb352d;
OP u32 factor_of_keys(u32 of_keys, u32 common) { return (of_keys & 1 ? 0x27d4eb2du : 1u) * (of_keys & 2 ? 0xc2b2ae3bu : 1u) * common; }
// The four words of 16 x 16 pairs.
OP RandomWords words_of(const RandomWords& second, u32 of_keys, u32 common = FACTOR) {
  const u32 x = second.x[0], y = second.x[1], z = second.x[2], w = second.x[3], m = factor_of_keys(of_keys, common), p = x + m * y;
  return {{p, y + m * z, z + m * w, w + m * p}};
}

OP Dropping dropping(const DropoutParams& of) {
  const RandomWords words = philox4x32_7(of.offset, 0, 0, 0, of.seed_low, of.seed_high);
  return {of.threshold * 0x10001u, of.scale, words.x[0], words.x[1], words.x[2], words.x[3]};
}
// The same kept once for a warp, see `uniform`: where lanes have no registers for it.
template <typename T> OP T once_a_warp(const T& x) { return {x.thresholds, x.scale, uniform(x.key), uniform(x.query), uniform(x.kv), uniform(x.rest)}; }

// How many of N blocks of 16 side by side one drawing is for: they start at a multiple of so many.
template <int N> constexpr int TOGETHER = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;

// Calls use(lane, block, words) with what each lane draws for each 16 x 16 elements of a fragment, whose blocks are numbered row by row. It
// starts at row0 and col0, multiples of 16, and col0 of 32 or 64 if N is. Rows are queries and columns keys, or TRANSPOSED the other way round.
template <bool TRANSPOSED, int M, int N, typename Use>
OP void for_words(const Dropping& dropout, u32 batch_head, int first_row, int first_col, Use use) {
  static_assert(M % 16 == 0 && N % 16 == 0, "pairs of which a lane has four words are in one fragment");
  constexpr int BESIDE = TOGETHER<N / 16>;
  // Not ahead, or what a row decides would be kept for all key tiles.
  const u32 row0 = not_ahead(first_row), col0 = first_col;
  for_lane(l) {
    #pragma unroll
    for (int block = 0; block < M / 16 * (N / 16); block += BESIDE) {
      const u32 row = row0 + block / (N / 16) * 16, col = col0 + block % (N / 16) * 16;
      const u32 query = TRANSPOSED ? col / 64 * 8 + l % 8 : row / 64 * 8 + l / 4 % 2 * 4 + l / 8;
      const u32 kv = TRANSPOSED ? row / 64 * 4 + l / 8 : col / 64 * 4 + l % 4;
      const RandomWords drawn = first_round(pcg(dropout.query + query), pcg(dropout.kv + kv), pcg(dropout.key + batch_head), pcg(dropout.rest));
      #pragma unroll
      for (int i = 0; i < BESIDE; ++i) {
        const u32 of_row = row / 16 % 4, of_col = BESIDE == 4 ? i : (col / 16 + i) % 4;
        const RandomWords second = second_round(drawn, change_of_queries(TRANSPOSED ? of_col : of_row));
        use(l, block + i, words_of(second, TRANSPOSED ? of_row : of_col));
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
// For a forward, whose registers have room for whole masks: which pairs of 16 queries and of N times 16 keys are kept. What the queries decide of a
// drawing is found once for all key tiles. Neither in a loop nor pinned: a compiler then mixes what `draw` does into exponentials.
template <int N> struct PairDrawing {
  Dropping dropout;
  Regs<u32, 1> x;                                             // of pcg4d, multiplied: the first word, which is a lane's queries',
  u32 z = 0;                                                  // and the third, which is the head's
  u32 f = 0;                                                  // how they change the second
  u32 common = FACTOR;                                        // but no constant: with one a compiler makes each word of the one before
  Regs<u32, 4 * N / TOGETHER<N>> words;
  OperandA<16> kept[N];                                       // all bits of a half where its pair is

  OP void begin_rows(u32 batch_head, int row0) {
    for_lane(l) {
      const int lane = not_ahead(l);
      x.at(l, 0) = pcg(dropout.query + u32(row0) / 64 * 8 + lane / 4 % 2 * 4 + lane / 8);
    }
    pin(x);                                                   // here, or it would be found again in each key tile
    z = uniform(pcg(dropout.key + batch_head)), f = uniform(change_of_queries(u32(row0) / 16 % 4)), common = uniform(u32(not_ahead(int(FACTOR))));
  }
  OP void draw(int col0, bool at_once) {
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < N; i += TOGETHER<N>) {
        const u32 y = pcg(dropout.kv + u32(col0 + 16 * i) / 64 * 4 + l % 4);
        const RandomWords drawn = second_round(first_round(x.at(l, 0), y, z, pcg(dropout.rest)), f);
        #pragma unroll
        for (int word = 0; word < 4; ++word) words.at(l, i / TOGETHER<N> * 4 + word) = drawn.x[word];
      }
    }
    if (at_once) find_kept(col0);
  }
  OP void find_kept(int col0) {
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < N; ++i) {
        const u32 of_keys = TOGETHER<N> == 4 ? i % 4 : (u32(col0) / 16 + i) % 4;
        RandomWords drawn;
        #pragma unroll
        for (int word = 0; word < 4; ++word) drawn.x[word] = words.at(l, i / TOGETHER<N> * 4 + word);
        drawn = words_of(drawn, of_keys, common);
        #pragma unroll
        for (int word = 0; word < 4; ++word) kept[i].at(l, word / 2 + word % 2 * 2) = whole_halves(dropout, drawn.x[word]);
      }
    }
  }
};
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
// Beneath products that are on their way.
template <int N> OP void draw(KeptHalves<N>& kept, const Dropping& dropout, u32 batch_head, int row0, int col0) {
  static_assert(N % 4 == 0, "four operands share a register");
  constexpr bool FULL = WIDTH <= 64;                          // no register is left
  const u32 of_keys = u32(row0) / 16 % 4, sum = dropout.key + batch_head, key = not_ahead(sum);
  for_lane(l) {
    const u32 kv = dropout.kv + u32(row0) / 64 * 4 + (FULL ? not_ahead(l) : l) / 8;
    const u32 query = u32(col0) / 64 * 8 + (FULL ? u32(not_ahead(int(dropout.query))) : dropout.query) + l % 8;
    #pragma unroll
    for (int i = 0; i < kept.size; ++i) {
      const RandomWords drawn = first_round(pcg(query + i * 8), pcg(kv), pcg(key), pcg(dropout.rest));
      kept.at(l, i) = 0;
      #pragma unroll
      for (int of_queries = 0; of_queries < 4; ++of_queries) {
        const RandomWords words = words_of(second_round(drawn, change_of_queries(of_queries)), of_keys);
        kept.at(l, i) <<= 4;
        #pragma unroll
        for (int word = 0; word < 4; ++word) kept.at(l, i) |= whole_halves<FULL>(dropout, words.x[word]) & 0x10001u << word;
      }
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

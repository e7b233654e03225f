// gradient_parts.cuh -- the elementwise part of the backward of float32 in parts of float16 (FP16_PARTS), as gradient.cuh of 16 bits. P, at most 1, becomes
// parts when it is 2^14 times as large. How large dS is nobody knows before: each tile of it has an exponent of its own, of its largest element. A row of a
// tile that lies so far below it that its parts would have fewer bits, a key to which no query gives much weight, is lifted by a power of two besides.
#pragma once
#include "tile/fp16_parts.cuh"
#include "tile/gradient.cuh"

constexpr int LIFTED_EXPONENT = 14;                           // of the largest element in float16
constexpr float P_LIFT = 1 << LIFTED_EXPONENT;
constexpr int MOST_EXPONENT = 100;                            // that anything is lifted by: its inverse is a normal number

// Four elements of 2^14 P, times the derivative of the softcap if there is one, on their way to the same lane of another warp: in float32, or of one part as
// it is multiplied.
OP void pass(SharedAddress passed, int lane, int r, const Four& p) {
  if constexpr (FP16_PARTS == 2) store_shared(passed + lane * 16 + r * 128, p);
  else store_shared(passed + lane * 8 + r * 64, Pair{bits_float(pack<half_t>(p.x[0], p.x[1])), bits_float(pack<half_t>(p.x[2], p.x[3]))});
}
OP Four receive(SharedAddress passed, int lane, int r) {
  if constexpr (FP16_PARTS == 2) return load_shared<Four>(passed + lane * 16 + r * 128);
  const Pair two = load_shared<Pair>(passed + lane * 8 + r * 64);
  const u32 left = float_bits(two.x[0]), right = float_bits(two.x[1]);
  return {unpack<half_t>(left, 0), unpack<half_t>(left, 1), unpack<half_t>(right, 0), unpack<half_t>(right, 1)};
}
// s becomes 2^14 p, p = 2^(scale_log2 * s - lse), which is passed.
template <int N> OP void probabilities(Acc<16, N>& s, SharedAddress lse, float scale_log2, float per_softcap, SharedAddress passed) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; r += 4) {                     // two rows of two columns
      const Pair stat = load_shared<Pair>(lse + s.col(l, r) * 4);
      Four factor;
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = s.at(l, r + i), bent = fmaxf(score * per_softcap, -2.f);           // of a masked pair it was infinite or NaN, and p is 0
        const float p = exp2_approx(fmaf(score, scale_log2, LIFTED_EXPONENT - stat.x[i % 2]));
        factor.x[i] = EXPLICIT_SCORES ? p * (1.f - bent * bent) : p;
        s.at(l, r + i) = p;
      }
      pass(passed, l, r, factor);
    }
  }
}
// dp becomes 2^14 ds, ds = p (of_dp * dp - delta), with p from the other warp, and delta of the columns from shared memory.
template <int N> OP void score_gradients(Acc<16, N>& dp, SharedAddress passed, SharedAddress delta, float of_dp) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < dp.regs; r += 4) {
      const Pair stat = load_shared<Pair>(delta + dp.col(l, r) * 4);
      const Four factor = receive(passed, l, r);
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float ds = factor.x[i] * fmaf(dp.at(l, r + i), of_dp, -stat.x[i % 2]);
        dp.at(l, r + i) = MASKED_PAIRS && factor.x[i] == 0.f ? 0.f : ds;  // of a pair that is masked alone, dP may be anything
      }
    }
  }
}

// The largest magnitude among the finite elements that a warp has.
template <int N> OP float largest_of_warp(const Acc<16, N>& x) {
  const auto largest = [&](bool some_infinite) {
    Regs<u32, 1> of_lane;
    for_lane(l) {
      float most = 0.f;
      #pragma unroll
      for (int r = 0; r < x.regs; ++r) {
        const float magnitude = fabsf(x.at(l, r));
        most = fmaxf(most, some_infinite && magnitude > HIGHEST ? 0.f : magnitude); // which is not NaN if magnitude is
      }
      of_lane.at(l, 0) = float_bits(most);
    }
    return bits_float(redux_max(of_lane));                    // numbers that are not negative have the order of their bits
  };
  const float most = largest(false);
  return most <= HIGHEST ? most : largest(true);
}
// The exponent with which what is at most so large nearly fills float16.
OP int exponent_of(float most) { return min_of(LIFTED_EXPONENT + 127 - int(float_bits(most) >> 23), MOST_EXPONENT); }
// That of a tile, from what its four warps have found.
OP int exponent_of_tile(SharedAddress largest) {
  const Four of_warps = load_shared<Four>(largest);
  return exponent_of(fmaxf(fmaxf(of_warps.x[0], of_warps.x[1]), fmaxf(of_warps.x[2], of_warps.x[3])));
}
OP float two_to(int e) { return bits_float(u32(e + 127) << 23); }
OP float inverse_of_tile(int exponent) { return two_to(-exponent) / P_LIFT; }

// What the two rows of a lane have been lifted by: powers of two, each as the exponent bits of its inverse, in one register.
struct Lifts : Regs<u32, 1> {
  OP Lifts(int exponent) {                                    // both by 2^exponent
    for_lane(l) at(l, 0) = u32(127 - exponent) * 0x10001u;
  }
  OP float inverse(int lane, int slot) const { return bits_float((at(lane, 0) >> 16 * slot & 0xff) << 23); }
};
// Whether some row of a warp has no high part as large as 2: high and low parts together stand apart by more than 2^-26 of its largest element then. Bit 14
// of a number of float16 says so, whatever its sign.
template <int K> OP bool some_row_is_low(const OperandA<16> (&x)[K]) {
  Regs<bool, 1> reached[2];                                   // of the two rows of a lane
  for_lane(l) {
    u32 bits[2] = {};
    #pragma unroll
    for (int i = 0; i < K / 2; ++i) {
      #pragma unroll
      for (int r = 0; r < 4; ++r) bits[r % 2] |= x[i].at(l, r);
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) reached[i].at(l, 0) = bits[i] & 0x40004000;
  }
  const auto of_quads = [](u32 lanes) {                       // bit 4 i: whether a lane of quad i has a bit
    lanes |= lanes >> 1;
    return (lanes | lanes >> 2) & 0x11111111;
  };
  return (of_quads(warp_ballot(reached[0])) & of_quads(warp_ballot(reached[1]))) != 0x11111111;
}
// Rows of x, which is 2^already times what it stands for, are lifted further, each by a power of two of its own.
template <int N> OP void lift_rows(Acc<16, N>& x, Lifts& lifts, int already) {
  RowVec<16> most;
  fill(most, 0.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < x.regs; ++r) most.at(l, x.slot(r)) = fmaxf(most.at(l, x.slot(r)), fabsf(x.at(l, r))); // which is not NaN if an element is
  }
  quad_reduce(most, [](float a, float b) { return fmaxf(a, b); });
  for_lane(l) {
    u32 inverse[2];
    float by[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {                             // of a row that is infinite nothing is left to save
      const int e = max_of(min_of(exponent_of(most.at(l, i)), MOST_EXPONENT - already), 0);
      by[i] = two_to(e), inverse[i] = 127 - already - e;
    }
    lifts.at(l, 0) = inverse[0] | inverse[1] << 16;
    #pragma unroll
    for (int r = 0; r < x.regs; ++r) x.at(l, r) *= by[x.slot(r)];
  }
}
// Where some row is low, all are lifted, and the operands made anew of them. One part is as exact as it can be down to 2^-28 of a weight of 1: not asked.
template <int K> OP void lift_low_rows(OperandA<16> (&operands)[K], Lifts& lifts, Acc<16, 16 * K / FP16_PARTS>& x, int already) {
  if constexpr (FP16_PARTS == 2) {
    if (!some_row_is_low(operands)) return;
    lift_rows(x, lifts, already);
    to_operands(operands, x);
  }
}

// 16 rows of the transpose of dS, at hand as operands, take their place in its tile.
template <int K, int ROWS, int WIDTH> OP void store_transposed(const PartsTile<ROWS, WIDTH>& tile, const OperandA<16> (&a)[K], int col0) {
  OperandA<16> part[K / 2];
  #pragma unroll
  for (int low = 0; low < 2; ++low) {
    #pragma unroll
    for (int i = 0; i < K / 2; ++i) part[i] = a[low * (K / 2) + i];
    store_transposed(low ? tile.low() : tile.high(), part, col0);
  }
}

// sum += factor product, of a tile whose rows were lifted.
template <int N> OP void promote(Acc<16, N>& sum, const Acc<16, N>& product, float factor, const Lifts& lifts) {
  for_lane(l) {
    float of_rows[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) of_rows[i] = factor / P_LIFT * lifts.inverse(l, i);
    #pragma unroll
    for (int r = 0; r < sum.regs; ++r) sum.at(l, r) = fmaf(product.at(l, r), of_rows[sum.slot(r)], sum.at(l, r));
  }
}

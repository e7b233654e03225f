// softcap.cuh -- a softcap in few instructions where scores lie near 0, as nearly all do.
//
// A tanh that is right relatively takes 14 instructions, one of them of the unit that exponentials need (tile/mask.cuh). For scores within the softcap
// tanh x / x is a polynomial of degree 5 in x^2, and seven instructions are left of it, together with the exponent that it ends in. So a step of
// fwd_hopper.cu takes that for all its pairs, and whether a score was beyond is found without an instruction of its own for each: the polynomial is in
// x^2 - 1, whose sign tells, and one operation joins the signs of two. Then the step is done again, as where P is too large. Other kernels ask before.
#pragma once
#include "tile/mask.cuh"
#include "tile/softmax.cuh"

// Where fwd_hopper.cu does so. With dropout of what a mask leaves, wide rows have no registers for it.
constexpr bool CAPPED = EXPLICIT_SCORES && SOFTCAP && SCORES == UNCHANGED && !FP16_PARTS && !(MASKED_PAIRS && (!TILE_LIST || (DROPOUT && max_of(WIDTH, WIDTH_V) > 192)));

// softcap * tanh(scale * score / softcap) of a product near 0, in units of log 2, over the product.
OP float cap_factor(float over, const CapPolynomial& cap) {
  float factor = cap.factors[0];
  #pragma unroll
  for (int i = 1; i < 6; ++i) factor = fmaf(factor, over, cap.factors[i]);
  return factor;
}

// `scale_scores` with that, where all products of a warp are near 0. What a score becomes does not depend on others: some may be what masks hide.
template <int M, int N, typename Params> OP void scale_scores(Acc<M, N>& s, const Params& p) {
  if (!(sizeof(Element) == 2 && SOFTCAP && SCORES != EXPRESSION && p.softcap > 0.f)) return scale_scores(s, p.scale, p.softcap);
  Regs<bool, 1> beyond;
  for_lane(l) {
    u32 signs = ~0u;
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) signs &= float_bits(fmaf(s.at(l, r), s.at(l, r), p.cap.minus_square));
    beyond.at(l, 0) = !(signs >> 31);
  }
  if (!warp_any(beyond)) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) s.at(l, r) *= cap_factor(fmaf(s.at(l, r), s.at(l, r), p.cap.minus_square), p.cap);
    }
  } else {
    const float inverse = cap_inverse(p.scale, p.softcap), height = p.softcap * LOG2E;
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) {
        const float over = fmaf(s.at(l, r), s.at(l, r), p.cap.minus_square), near = s.at(l, r) * cap_factor(over, p.cap);
        s.at(l, r) = float_bits(over) >> 31 ? near : tanh_by_sinh(s.at(l, r) * inverse) * height;
      }
    }
  }
}

// s becomes p = 2^(capped score - max), `sum` this lane's share of the sum of p, or infinity where a score is not near.
template <int N> OP void exponentiate_capped(const RegisterPair& offsets, Acc<16, N>& s, RowVec<16>& sum, const CapPolynomial& cap) {
  RowVec<16> offset, near;
  apart(offset, offsets);
  fill(sum, -0.f), fill(near, -1.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      const float score = s.at(l, r), over = fmaf(score, score, cap.minus_square);
      float& signs = near.at(l, s.slot(r));
      signs = bits_float(float_bits(signs) & float_bits(over));
      const float p = exp2_approx(fmaf(score, cap_factor(over, cap), offset.at(l, s.slot(r))));
      s.at(l, r) = p;
      sum.at(l, s.slot(r)) += p;
    }
    #pragma unroll
    for (int i = 0; i < sum.slots; ++i) sum.at(l, i) = float_bits(near.at(l, i)) >> 31 ? sum.at(l, i) : infinity();
  }
  pin(s);                                                     // all of this now, and not when the product beneath has been waited for
  pin(sum);
}

// Whether one of these products is of a score that is not near, in rows before `rows`.
template <int N> OP Regs<bool, 1> beyond_polynomial(const Acc<16, N>& s, int rows, const CapPolynomial& cap) {
  Regs<bool, 1> any;
  RowVec<16> near;
  fill(near, -1.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      float& signs = near.at(l, s.slot(r));
      signs = bits_float(float_bits(signs) & float_bits(fmaf(s.at(l, r), s.at(l, r), cap.minus_square)));
    }
  }
  fill_from(near, rows, -1.f);
  for_lane(l) {
    any.at(l, 0) = false;
    #pragma unroll
    for (int i = 0; i < near.slots; ++i) any.at(l, 0) |= !(float_bits(near.at(l, i)) >> 31);
  }
  return any;
}

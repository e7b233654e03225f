// gradient.cuh -- the elementwise part of the backward: P from the scores and their log-sum-exp, dS from P and dP.
// Everything here is transposed: a row is a key, a column a query, and what belongs to a query is a number per column.
#pragma once
#include "tile/blocked.cuh"
#include "tile/dropout.cuh"

// cols = src[0 : N], in shared memory
template <int N> OP void load(ColVec<N>& cols, SharedAddress src) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < cols.slots; i += 2) {
      const Pair pair = load_shared<Pair>(src + cols.col(l, i) * 4);
      cols.at(l, i) = pair.x[0], cols.at(l, i + 1) = pair.x[1];
    }
  }
}

// s becomes p = 2^(scale_log2 * s - lse), and the other warp is passed p, times the derivative of the softcap if there is one.
template <int M, int N>
OP void probabilities(Acc<M, N>& s, const ColVec<N>& lse, float scale_log2, float per_softcap, PassedTile<M, N> passed) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; r += passed.per_move) {
      float factor[passed.per_move];
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i) {
        const float score = s.at(l, r + i);
        const float p = exp2_approx(fmaf(score, scale_log2, -lse.at(l, s.col_slot(r + i))));
        s.at(l, r + i) = factor[i] = p;
        if (EXPLICIT_SCORES) {
          const float bent = fmaxf(score * per_softcap, -2.f);          // of a masked pair it was infinite or NaN, and p is 0
          factor[i] = p * (1.f - bent * bent);
        }
      }
      store_shared(passed.at(l, r), pack_moved(factor));
    }
  }
}

// dp becomes ds = p (dp - delta), with p from the other warp
template <int M, int N> OP void score_gradients(Acc<M, N>& dp, const ColVec<N>& delta, PassedTile<M, N> passed) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < dp.regs; r += passed.per_move) {
      const Moved p = load_shared<Moved>(passed.at(l, r));
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i) {
        const float factor = unpack_moved(p, i), ds = factor * (dp.at(l, r + i) - delta.at(l, dp.col_slot(r + i)));
        dp.at(l, r + i) = MASKED_PAIRS && factor == 0.f ? 0.f : ds;         // of a pair that is masked alone, dP may be anything
      }
    }
  }
}

// Of a score, less the log-sum-exp. PLUS_LINEAR: the statistics are without what belongs to the key, which is `term`.
OP float exponent(float score, float scale_log2, float lse, float term) {
  return fmaf(score, scale_log2, SCORES == PLUS_LINEAR ? term - lse : -lse);
}

// Whether what multiplies dP - delta is not what multiplies dO: P times a derivative, or P without dropout.
constexpr bool FACTOR_APART = EXPLICIT_SCORES || (SCORES == SCALED && !SCALE_SUMS) || DROPOUT;

// The same where one warp has both S and dP, which leaves no registers for P in float32: p_reg becomes P as an A operand, of `kept` pairs if
// there is dropout, and FACTOR_APART factor_reg all of P, with a softcap times its derivative, SCALED times `slope`. The log-sum-exp of the
// columns is read from shared memory when it is needed.
template <int N>
OP void probabilities(Acc<16, N>& s, OperandA<16> (&p_reg)[N / 16], OperandA<16> (&factor_reg)[N / 16], SharedAddress lse, float scale_log2,
                      float per_softcap, const RowVec<16>& terms, float slope, const KeptHalves<N / 16>& kept) {
  for_lane(l) {
    const int lane = TMA_REDUCE_DQ ? not_ahead(l) : l;
    #pragma unroll
    for (int r = 0; r < s.regs; r += 4) {                     // two rows of two columns
      const Pair stat = load_shared<Pair>(lse + s.col(lane, r) * 4);
      #pragma unroll
      for (int row = 0; row < 2; ++row) {
        float p[2], factor[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float score = s.at(l, r + 2 * row + i), bent = fmaxf(score * per_softcap, -2.f);          // of a masked pair it was infinite or NaN, and p is 0
          p[i] = exp2_approx(exponent(score, scale_log2, stat.x[i], terms.at(l, row)));
          factor[i] = SCORES == SCALED ? (p[i] == 0.f ? 0.f : p[i] * slope) : EXPLICIT_SCORES ? p[i] * (1.f - bent * bent) : p[i];
        }
        p_reg[r / 8].at(l, r / 4 % 2 * 2 + row) = pack<Element>(p[0], p[1]);
        if constexpr (DROPOUT) p_reg[r / 8].at(l, r / 4 % 2 * 2 + row) &= kept.whole(l, r / 8, r / 4 % 2 * 2 + row);
        if (FACTOR_APART) factor_reg[r / 8].at(l, r / 4 % 2 * 2 + row) = pack<Element>(factor[0], factor[1]);
      }
    }
  }
}
// An A operand passed from a warp to the same lanes of another one.
template <int N> OP void pass(PassedTile<16, N> to, const OperandA<16> (&a)[N / 16]) {
  for_lane(l) {
    const int lane = not_ahead(l);
    #pragma unroll
    for (int i = 0; i < N / 16; ++i) store_shared(to.at(lane, 8 * i), Moved{a[i].at(l, 0), a[i].at(l, 1), a[i].at(l, 2), a[i].at(l, 3)});
  }
}
template <int N> OP void receive(OperandA<16> (&a)[N / 16], PassedTile<16, N> from) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      const Moved moved = load_shared<Moved>(from.at(l, 8 * i));
      #pragma unroll
      for (int r = 0; r < 4; ++r) a[i].at(l, r) = moved.words[r];
    }
  }
}
// All bits of a half of x that is not zero, and none of one that is.
OP u32 halves_not_zero(u32 x) { return prmt_signs<1>((x & 0x7fff7fffu) + 0x7fff7fffu); }

// a where factor is not zero, and 0 elsewhere, whatever is there.
template <int N> OP void clear_where_zero(OperandA<16> (&a)[N], const OperandA<16> (&factor)[N]) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      #pragma unroll
      for (int r = 0; r < 4; ++r) a[i].at(l, r) &= halves_not_zero(factor[i].at(l, r));
    }
  }
}
// ds_reg = factor_reg o (dp - delta), as an A operand; delta of the columns is in shared memory, or has been subtracted. SCALED: times `slope`,
// where factor_reg is not, unless SCALE_SUMS. `ask_pairs`: whether pairs may be masked alone in this tile, of which dP may be anything.
template <bool SUBTRACT, int N>
OP void score_gradients(OperandA<16> (&ds_reg)[N / 16], const OperandA<16> (&factor_reg)[N / 16], const Acc<16, N>& dp, SharedAddress delta,
                        float slope = 1.f, bool ask_pairs = true) {
  for_lane(l) {
    const int lane = not_ahead(l);
    #pragma unroll
    for (int r = 0; r < dp.regs; r += 4) {                    // two rows of two columns
      const Pair stat = SUBTRACT ? load_shared<Pair>(delta + dp.col(lane, r) * 4) : Pair{};
      #pragma unroll
      for (int row = 0; row < 2; ++row) {
        const u32 factor = factor_reg[r / 8].at(l, r / 4 % 2 * 2 + row);
        float ds[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          ds[i] = unpack<Element>(factor, i) * (SUBTRACT ? dp.at(l, r + 2 * row + i) - stat.x[i] : dp.at(l, r + 2 * row + i));
          if (SCORES == SCALED && !SCALE_SUMS) ds[i] *= slope; // 1 where factor_reg is
        }
        ds_reg[r / 8].at(l, r / 4 % 2 * 2 + row) = pack<Element>(ds[0], ds[1]);
      }
    }
  }
  if constexpr (MASKED_PAIRS) {
    if (ask_pairs) clear_where_zero(ds_reg, factor_reg);
  }
}

// Each row of acc = cols[0 : N], in shared memory.
template <int M, int N> OP void fill_rows(Acc<M, N>& acc, SharedAddress cols) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 4) {
      const Pair pair = load_shared<Pair>(cols + acc.col(l, r) * 4);
      #pragma unroll
      for (int i = 0; i < 4; ++i) acc.at(l, r + i) = pair.x[i % 2];
    }
  }
  pin(acc);                                                   // here, not when other products run: those would be waited for
}
// a += b
template <int M, int N> OP void add(Acc<M, N>& a, const Acc<M, N>& b) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < a.regs; ++r) a.at(l, r) += b.at(l, r);
  }
}

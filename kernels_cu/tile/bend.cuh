// bend.cuh -- a linear term that bends (BENDS): behind the key that a query meets it changes by another step from a key to the next, as
// -slope |q_idx - kv_idx| does, which is ALiBi where queries see what follows. The term before the diagonal is `term_of`, everywhere; behind it comes
// so much for each key as `bend_of` says. In a tile that lies before the diagonal, or beyond it, the term is linear, and costs what any linear term
// does. Only where the diagonal goes through a tile is each pair asked how far it is beyond.
#pragma once
#include "tile/score_context.cuh"

enum Bend { BEFORE, ACROSS, BEYOND };                         // where pairs of a tile lie
// Of so many keys from `key` on, and queries of which the first meets the key `met`.
OP Bend bend_at(int met, int queries, int key, int keys) {
  if constexpr (!BENDS) return BEFORE;
  return key + keys - 1 <= met ? BEFORE : key >= met + queries - 1 ? BEYOND : ACROSS;
}
// What a backward has of a query: lse and delta, and BENDS lse as tiles beyond the diagonal need it.
constexpr int STATS = 2 + BENDS;

// How far a key is beyond the one that the query meets.
template <typename Context> OP int beyond_diagonal(const Context& x, int query, int key) { return key - query - diagonal_of(x); }

// ACROSS: what scores of pairs beyond the diagonal have besides. Rows are queries, and columns keys, or TRANSPOSED the other way round.
template <bool TRANSPOSED, int M, int N> OP void bend_scores(Acc<M, N>& s, const ScoreContext& x, int row0, int col0) {
  const float bend = bend_of(x) * x.unit;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const int row = row0 + RowVec<M>::row(l, i), col = col0 + s.col(l, 0);
      const float first = float(TRANSPOSED ? beyond_diagonal(x, col, row) : beyond_diagonal(x, row, col));
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) {
        const float further = float(s.reg_col(r));
        if (s.slot(r) == i) s.at(l, r) = fmaf(fmaxf(TRANSPOSED ? first - further : first + further, 0.f), bend, s.at(l, r));
      }
    }
  }
}

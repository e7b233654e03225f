// expression.cuh -- what the user's expressions say. The planner hands the compiler this same text with the expressions of a problem in place
// of what is returned here: nothing becomes of scores, and every pair takes part. `x` is what tile/score.cuh calls ScoreContext.
#pragma once

constexpr bool HAS_BIAS = false;          // whether there is such an array, and what its elements are
constexpr bool HAS_PAIR_MASK = false;
constexpr bool HAS_ALIBI = false;
typedef float BiasElement;
typedef float AlibiSlope;

// what a score becomes; q_idx and kv_idx are the places of the query and of the key in their sequences
template <typename Context> OP float score_of(float score, int q_idx, int kv_idx, const Context& x) {
  return score;
}
// how fast it does, with the score
template <typename Context> OP float slope_of(float score, int q_idx, int kv_idx, const Context& x) {
  return 1.f;
}
// whether a query sees a key
template <typename Context> OP bool takes_part(int q_idx, int kv_idx, const Context& x) {
  return true;
}

// expression.cuh -- what the user's expressions say. The planner hands the compiler this same text with the expressions of a problem in place
// of what is returned here: nothing becomes of scores, and every pair takes part. `x` is what tile/score.cuh calls ScoreContext.
#pragma once

constexpr bool HAS_BIAS = false;          // whether there is such an array, and what its elements are
constexpr bool HAS_PAIR_MASK = false;
constexpr bool BIAS_BY_TWO = false;       // whether two neighbouring keys have their elements side by side, at a multiple of their bytes
constexpr bool MASK_BY_TWO = false;
constexpr bool MASK_IN_LOOP = false;      // whether takes_part is so long a text that pairs are asked in a loop
constexpr bool MASK_READS = false;        // whether it reads arrays
constexpr bool HAS_ALIBI = false;
constexpr bool BENDS = false;             // PLUS_LINEAR: the term changes by another step behind the key that a query meets, see tile/bend.cuh
constexpr bool HAS_KEY_TERM = false;      // PLUS_TERM: a term of the key alone is added as well, see tile/key_terms.cuh
constexpr int UNIFORMS = 0;               // parts of the expressions that all pairs of a head have in common
// Of the array whose gradient bwd_scores computes: whether which element a pair reads depends on its query, on its key, or on how far these are
// apart alone.
constexpr bool OF_QUERY = false;
constexpr bool OF_KEY = false;
constexpr bool OF_DISTANCE = false;
constexpr bool GATHERED = false;          // an index is computed: each element is summed up from those queries, keys or distances that read it
constexpr bool SCATTERED = false;         // it is, and each pair's share is added to whichever element it reads
constexpr bool BY_SCORE = false;          // which depends on the score among others
constexpr bool CLAMPED = false;           // an index is a place in a packed sequence, which may be longer than its axis of the array
constexpr bool ONE_BIAS = false;          // bwd_scores_hopper: it is a bias of queries and keys, and scores become nothing more
constexpr bool HAS_FACTOR = false;        // whether factor_of is anything but 1
typedef float GradientElement;
typedef float BiasElement;
typedef float AlibiSlope;

// Where a query and a key are in their sequences, as ints and as floats, which hold them exactly.
struct PairPlace {
  bool transposed;                        // queries are the columns of a fragment, and keys its rows
  int q_idx, kv_idx;
  float row, first_col, further;          // the column is the first one of the lane, and so many further
  float bias;                             // what arrays have for the pair
  bool seen;
  bool within;                            // the column is not beyond the end
  // which element of an axis is the pair's: beyond the end the last one
  OP int element_q(int q_len) const { return transposed && within ? q_idx : min_of(q_idx, q_len - 1); }
  OP int element_kv(int kv_len) const { return !transposed && within ? kv_idx : min_of(kv_idx, kv_len - 1); }
  OP float q_float() const { return transposed ? first_col + further : row; }
  OP float kv_float() const { return transposed ? row : first_col + further; }
  // q_idx - kv_idx + more: an operation a pair, and what a row has in common once
  OP float distance(float more) const { return transposed ? first_col - row + more + further : row + more - first_col - further; }
};

// one of UNIFORMS, which is computed before the pairs are
template <typename Context> OP float uniform_of(int number, const Context& x) {
  return 0.f;
}
// what is added to a score: times x.unit (SCORES == PLUS_TERM), or in natural units (PLUS_LINEAR)
template <typename Context> OP float term_of(const PairPlace& at, const Context& x) {
  return 0.f;
}
// and besides of its key alone, in natural units (HAS_KEY_TERM)
template <typename Context> OP float key_term_of(const PairPlace& at, const Context& x) {
  return 0.f;
}
// how much that changes from a key to the next, and from a query (PLUS_LINEAR; BENDS: up to the key that a query meets, and the same behind it)
template <typename Context> OP float per_key_of(const Context& x) {
  return 0.f;
}
template <typename Context> OP float per_query_of(const Context& x) {
  return 0.f;
}
// BENDS: by how much more it changes from a key to the next behind that; and the key that the first query meets
template <typename Context> OP float bend_of(const Context& x) {
  return 0.f;
}
template <typename Context> OP int diagonal_of(const Context& x) {
  return 0;
}
// what a score becomes (SCORES == EXPRESSION)
template <typename Context> OP float score_of(float score, const PairPlace& at, const Context& x) {
  return score;
}
// how fast it does, with the score
template <typename Context> OP float slope_of(float score, const PairPlace& at, const Context& x) {
  return 1.f;
}
// whether a query sees a key
template <typename Context> OP bool takes_part(const PairPlace& at, const Context& x) {
  return true;
}
// whether those of a tile do, as intervals of tile/interval.cuh
template <typename Context> OP Interval<bool> takes_part_in(const TilePlace& at, const Context& x) {
  return anything<bool>();
}
// the same with what the pair reads of that array
template <typename Context> OP float factor_of(float score, const PairPlace& at, const Context& x) {
  return 1.f;
}
// and which element that is, GATHERED or SCATTERED, in the order of an array without gaps
template <typename Context> OP i64 element_of(float score, const PairPlace& at, const Context& x) {
  return 0;
}

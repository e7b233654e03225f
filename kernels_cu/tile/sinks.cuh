// sinks.cuh -- logits of each row besides those of its keys, which belong to no value: they are in the sum of a softmax, and so in the
// log-sum-exp, and nowhere else. (Xiao et al., 2024, "Efficient streaming language models with attention sinks", as gpt-oss learns them.)
#pragma once
#include "tile/copy.cuh"
#include "tile/mask.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"

using Sink = Choose<SINKS == SINKS_FLOAT32, float, Element>;

// number `i` of the sinks of a query head
template <typename Params> OP float read_sink(const Params& p, int head, int i) {
  count_read(sizeof(Sink));
  return to_float(static_cast<const Sink*>(p.sinks.data)[head * p.sinks.head_stride + i * p.sinks.row_stride]);
}

// How many a row has. A loop for several would cost fwd_hopper a twentieth at dim 128, though it is left at once: see docs/tuning-hopper-forward.md.
template <typename Params> OP constexpr int sinks_of(const Params& p) { return SEVERAL_SINKS ? int(p.sinks_of_head) : 1; }

// A state takes the sinks of its rows into its sum. What it has summed up besides has to be multiplied by `correction`.
template <int M, typename Params>
OP void join_sinks(OnlineSoftmax<M>& state, RowVec<M>& correction, const Params& p, const Mask& mask, int head, int row0) {
  fill(correction, 1.f);
  #pragma unroll 1
  for (int i = 0; i < sinks_of(p); ++i) {
    RowVec<M> sink, factor, weight;
    for_lane(l) {
      #pragma unroll
      for (int slot = 0; slot < sink.slots; ++slot) sink.at(l, slot) = read_sink(p, query_head(mask, head, row0 + sink.row(l, slot), p.len_q), i);
    }
    join(state, sink, factor, weight);
    multiply(correction, factor);
  }
}

// A state that has seen nothing yet begins with the sinks of its rows.
template <int M, typename Params> OP void start_with_sinks(OnlineSoftmax<M>& state, const Params& p, const Mask& mask, int head, int row0) {
  RowVec<M> correction;                                       // of nothing
  join_sinks(state, correction, p, mask, head, row0);
}

// The same of one row of a query head, whose state all lanes have: the sum of all keys and its maximum. Returns the correction.
template <typename Params> OP float join_sinks(float& max, float& sum, const Params& p, int head) {
  float correction = 1.f;
  #pragma unroll 1
  for (int i = 0; i < sinks_of(p); ++i) {
    const float score = read_sink(p, head, i) * LOG2E, top = fmaxf(max, score), safe = fmaxf(top, LOWEST), factor = exp2_approx(max - safe);
    sum = fmaf(sum, factor, exp2_approx(score - safe));
    correction *= factor;
    max = top;
  }
  return correction;
}

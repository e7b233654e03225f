// merge.cu -- the attention over two sets of keys, from the attention over each:
//
//   for each query row:
//     m = max(lse_a, lse_b)
//     w_a = e^(lse_a - m),  w_b = e^(lse_b - m)
//     out = (w_a out_a + w_b out_b) / (w_a + w_b),  lse = m + log(w_a + w_b)
//
// A set of which a row sees no key has weight 0, and whatever its out holds is left out.
#include "config.cuh"
#include "params.cuh"
#include "tile/copy.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"

KERNEL(32 * WARPS, 1) merge(GRID_CONSTANT MergeParams p) {
  const BlockCoord here = block_coord(p.batch, p.heads, p.len_q, TILE_Q);
  const GlobalTile out_a = slice(p.out_a, here.batch, here.head, here.row, p.len_q, p.dim_v);
  const GlobalTile out_b = slice(p.out_b, here.batch, here.head, here.row, p.len_q, p.dim_v);
  const GlobalTile out = slice(p.out, here.batch, here.head, here.row, p.len_q, p.dim_v);
  const float* lse_a = row_slice(p.lse_a, here.batch, here.head, here.row);
  const float* lse_b = row_slice(p.lse_b, here.batch, here.head, here.row);
  float* lse = row_slice(p.lse, here.batch, here.head, here.row);
  for_rows<TILE_Q>(out, [&](int row, bool first) {
    const Weights weights = weights_of(read(lse_a + row * p.lse_a.row_stride), read(lse_b + row * p.lse_b.row_stride));
    if (first) write(lse + row * p.lse.row_stride, weights.lse);
    return weights;
  }, [&](int row, int col, const Weights& weights) {
    const float a = weights.a == 0.f ? 0.f : weights.a * read(out_a, row, col);
    const float b = weights.b == 0.f ? 0.f : weights.b * read(out_b, row, col);
    write(out, row, col, a + b);
  });
}

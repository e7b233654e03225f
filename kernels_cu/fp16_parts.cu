// fp16_parts.cu -- float32 q, k and v as numbers of float16, from which fwd_hopper.cu makes products, see tile/fp16_parts.cuh:
//
//   fp16_parts_largest  a block for some rows of a head of an array, a warp for some of these:
//     largest = max |x|                                        of what is finite
//
//   fp16_parts          a block for the same rows:
//     e = the exponent with which 2^14 <= largest of the head * 2^e < 2^15
//     high = float16(x * 2^e);  low = float16(x * 2^e - high)  FP16_PARTS 1: no low. Columns beyond the array are zero
//                       and the last blocks, a warp for each query head:
//     factors = 2^-(e of q + e of k), 2^-(e of v)              what its scores and its results are multiplied by
#include "config.cuh"
#include "row_params.cuh"
#include "tile/head_parts.cuh"

KERNEL(32 * WARPS, MIN_BLOCKS) fp16_parts_largest(GRID_CONSTANT Fp16PartsParams p) {
  float* const found = p.largest + i64(block_id()) * WARPS + warp_id();
  find_largest(found, p, rows_of_head(p, block_id()));
}

KERNEL(32 * WARPS, MIN_BLOCKS) fp16_parts(GRID_CONSTANT Fp16PartsParams p) {
  const int beyond = int(block_id()) - p.first_of_factors;
  if (beyond >= 0) return store_factors(p, beyond * WARPS + warp_id());
  const RowsOfHead at = rows_of_head(p, block_id());
  make_parts(p, at, exponent_of_head(p, at.operand, at.head));
}

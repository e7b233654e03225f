// fp16_parts.cu -- float32 q, k and v as numbers of float16, from which fwd_hopper.cu makes products, see tile/fp16_parts.cuh:
//
//   fp16_parts          a block for some rows of a head of an array:
//     e = the exponent with which 2^11 <= largest * 2^e < 2^12  of some rows spread over the head
//     high = float16(x * 2^e);  low = float16(x * 2^e - high)  FP16_PARTS 1: no low. Columns beyond the array are zero
//     largest = max |x|                                        of what is finite
//
//   fp16_parts_again    a block for the same rows:
//     if largest of the head * 2^e >= 2^15: e smaller, so that it is not, and all once more
//                       and the last blocks, a warp for each query head:
//     factors = 2^-(e of q + e of k), 2^-(e of v)              what its scores and its results are multiplied by
//
//   VARLEN: a head is that of a sequence, of which rows that are no queries, or no keys, have no parts. A block has 256 rows, numbered as tiles are.
//
// So each element is mostly read once, where finding the largest before would be a second time.
#include "config.cuh"
#include "row_params.cuh"
#include "tile/head_parts.cuh"

constexpr int SHARED_BYTES = WARPS * int(sizeof(float));      // the largest of the rows that each warp has looked at before

KERNEL(32 * WARPS, MIN_BLOCKS) fp16_parts(GRID_CONSTANT Fp16PartsParams p) {
  const RowsOfHead at = rows_of_head(p, block_id());
  if (VARLEN && at.row == at.end) return;
  const int exponent = sampled_exponent(p, at);
  store_found(p, at, exponent, make_parts(p, at, exponent));
}

KERNEL(32 * WARPS, MIN_BLOCKS) fp16_parts_again(GRID_CONSTANT Fp16PartsParams p) {
  const int beyond = int(block_id()) - p.first_of_factors;
  if (beyond >= 0) return store_factors(p, beyond * WARPS + warp_id());
  const RowsOfHead at = rows_of_head(p, block_id());
  if (VARLEN && at.row == at.end) return;
  const Exponent exponent = exponent_of_head(p, at.operand, at.head);
  if (exponent.changed) make_parts(p, at, exponent.e);
}

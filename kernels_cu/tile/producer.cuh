// producer.cuh -- the producer warpgroup of bwd_hopper_wide.cu, bwd_hopper_mla.cu and bwd_hopper_parts.cu: which warp brings tiles, and which do what
// adding to dQ needs.
#pragma once
#include "tile/dq_protocol.cuh"
#include "tile/key_loads.cuh"

OP void produce(const HopperBackwardParams& p, KeyBlock& block) {
  if (warp_id() == 0) load_tiles(p, block);
  if (warp_id() == 1) acquire_dq_order(p, block);
  if (warp_id() == 2) release_dq_order(p, block);
  if (STORE_DBIAS && warp_id() == 3) send_dbias(p, block);
  if constexpr (ZEROS_AHEAD) {
    if (warp_id() == 3) let_add(p, block), make_zeros_ahead(p, block);
  }
  if (warp_id() == 3) count_heads(p, block);
}

// dbias_sums.cuh -- CLUSTER: the gradient of a bias that batch elements share. The blocks of a cluster own the same keys, of as many elements, and go
// through the same query tiles in step; what an element of the gradient is the sum of, they have at about the same time. They deal the rows of a
// query tile out, so that each sums up a slice of it. Three warps of each block do that, which have no work where dQ is summed in any order:
//
//   send_slices, one warp, for each step:       dS is written  ->  slice r of it goes to block r                  (distributed shared memory)
//   sum_slices, two warps, a panel each:        slices of all blocks have come  ->  their sum leaves              (by TMA)
//
//   received     in each block, of a stage of slices: those of all blocks have come
//   delivered    in each block: all blocks have its slices, and dS may be overwritten
//   summed       in each block, of a stage: all blocks have summed up what is in that stage of theirs, and it may be overwritten
#pragma once
#include "tile/cluster.cuh"
#include "tile/key_block.cuh"

// One of the warps that `written` counts, as in `send_dbias`.
OP void send_slices(const KeyBlock& block) {
  const u32 own = rank_in_cluster<CLUSTER>();
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step) {
    arrive_at<LANES>(block.written);                          // without it the consumers wait for ever
    wait_for<LANES>(block.written, step % 2);                 // without it dS leaves that has not been written
    if (step >= SLICE_STAGES) wait_for<LANES>(block.summed(step), (step / SLICE_STAGES - 1) % 2); // without it slices are overwritten that are still read
    arrive_expect_tx(block.received(step), GradientTile::bytes);
    const SharedAddress ds_smem = block.ds_smem(step).base;
    const auto slice = [=](int rank, int panel) { return ds_smem + panel * GradientTile::panel_bytes + rank * SliceTile::panel_bytes; };
    send_async<CLUSTER, SliceTile::panels>(block.slice_smem(step, own).base, SliceTile::panel_bytes, slice, SliceTile::panel_bytes, block.received(step));
    wait_for<LANES>(block.received(step), step / SLICE_STAGES % 2); // without it others overwrite dS that has not come here
    arrive_in_cluster<CLUSTER>(block.delivered);              // without it they wait for ever
    wait_for<LANES>(block.delivered, step % 2);               // without it dS is overwritten that has not left
  }
  // Without it the block, and its shared memory and barriers, may end before others have arrived there.
  for (int step = max_of(block.steps, SLICE_STAGES); step < block.steps + SLICE_STAGES; ++step) wait_for<LANES>(block.summed(step), (step / SLICE_STAGES - 1) % 2);
}

constexpr int BYTES_OF_LANE = CLUSTER > 4 ? 8 : 16;           // of each slice at once, so that those of all have room in the registers

OP void sum_slices(const HopperBackwardParams& p, KeyBlock& block, int panel) {
  static_assert(SliceTile::panels == 2, "a panel for each of two warps");
  static_assert(SliceTile::panel_bytes % (32 * BYTES_OF_LANE) == 0, "and all lanes have as much of it");
  const int first_row = int(rank_in_cluster<CLUSTER>()) * SliceTile::rows;
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance(p)) {
    const SharedAddress slices = block.slice_smem(step, 0).base + panel * SliceTile::panel_bytes;
    wait_for<LANES>(block.received(step), step / SLICE_STAGES % 2); // without it slices are summed up that have not come
    #pragma unroll 1
    for (int i = 0; i < SliceTile::panel_bytes; i += 32 * BYTES_OF_LANE) {
      for_lane(l) {
        const SharedAddress of_lane = slices + i + l * BYTES_OF_LANE;
        Vector<BYTES_OF_LANE> x[CLUSTER], sum;
        #pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) x[rank] = load_shared<Vector<BYTES_OF_LANE>>(of_lane + rank * SliceTile::bytes);
        #pragma unroll
        for (int word = 0; word < BYTES_OF_LANE / 4; ++word) {
          float low = element_of(x[0], 2 * word), high = element_of(x[0], 2 * word + 1);
          #pragma unroll
          for (int rank = 1; rank < CLUSTER; ++rank) low += element_of(x[rank], 2 * word), high += element_of(x[rank], 2 * word + 1);
          sum.words[word] = pack<Element>(low, high);
        }
        store_shared(of_lane, sum);                           // where the lane has read the slice of the first block
      }
    }
    fence_proxy_async();                                      // without it sums leave that have not been written
    const PanelTile<SliceTile::rows, 64> sums{slices};
    store_async<SliceTile::rows>(p.dbias_map, block.here.batch, block.now.head, block.now.tile * TILE_Q + first_row, sums, 0, block.row0 + panel * 64);
    wait_for_stores();                                        // without it sums are overwritten that have not left
    arrive_in_cluster<CLUSTER>(block.summed(step));           // without it others wait for ever
  }
}

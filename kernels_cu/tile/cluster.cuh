// cluster.cuh -- blocks of a cluster run at the same time, and reach each other's shared memory. (PTX ISA, "Cluster of cooperative thread arrays".)
#pragma once
#include "tile/pipeline.cuh"

// A cluster has SIZE neighbouring blocks of the grid. Which of them a block is:
template <int SIZE> OP u32 rank_in_cluster() { return block_id() % SIZE; }

#if ON_GPU
OP void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
OP void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// where the block of this rank has what this one has here
OP u32 mapa(SharedAddress here, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  return there;
}
// Only of what TMA copies: a lane's own stores would need .release.cluster, which waits for all that the warp has on its way to device memory.
OP void mbarrier_arrive_there(u32 barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory"); }
OP void cp_async_bulk_to_cluster(u32 dst, SharedAddress src, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "r"(src), "r"(bytes), "r"(barrier) : "memory");
}
#endif

// All warps of the cluster, in place of sync_block: what they have written to shared memory is seen, and barriers count there, in all its blocks.
template <int SIZE> OP void sync_cluster([[maybe_unused]] CallSite at = call_site()) {
#if ON_GPU
  barrier_cluster_arrive();
  barrier_cluster_wait();
#else
  host::sync_cluster(at);
#endif
}
// Arrives at this barrier in each block of the cluster.
template <int SIZE> OP void arrive_in_cluster(Mbarrier barrier, [[maybe_unused]] CallSite at = call_site()) {
#if ON_GPU
  if (lane_id() < SIZE) mbarrier_arrive_there(mapa(barrier.address, lane_id()));
#else
  for (int rank = 0; rank < SIZE; ++rank) host::arrive_there(rank, barrier.address, at);
#endif
}
// In each block of the cluster, `to` and so many bytes behind it = what is at from(rank, part), for each of PARTS parts, `apart` bytes apart in `to`, is on
// its way, by TMA; its barrier counts the bytes.
template <int SIZE, int PARTS, typename From> OP void send_async(SharedAddress to, int apart, From from, int bytes, Mbarrier barrier, [[maybe_unused]] CallSite at = call_site()) {
  static_assert(SIZE * PARTS <= 32, "a lane for each copy");
#if ON_GPU
  const int lane = lane_id(), rank = lane / PARTS, part = lane % PARTS;
  if (lane < SIZE * PARTS) cp_async_bulk_to_cluster(mapa(to + part * apart, rank), from(rank, part), bytes, mapa(barrier.address, rank));
  __syncwarp();
#else
  for (int rank = 0; rank < SIZE; ++rank)
    for (int part = 0; part < PARTS; ++part) host::send_async(rank, to + part * apart, from(rank, part), bytes, barrier.address, at);
#endif
}

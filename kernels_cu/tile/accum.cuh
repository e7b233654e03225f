// accum.cuh -- float32 sums in device memory: the workspace of kernels that add to one result more than once.
#pragma once
#include "tile/shared.cuh"

// ROWS x WIDTH sums in the order of fragments: 16 x 16 blocks, row by row; in a block first registers 0 ... 3 of all lanes, then
// 4 ... 7. A warp so moves 512 neighbouring bytes at once, and no tile size or number of warps is part of the order.
template <int ROWS, int WIDTH> struct AccumTile {
  static constexpr int size = ROWS * WIDTH, cols = WIDTH;
  float* base;
  static OP constexpr int offset(int row0, int col0) { return (row0 / 16 * (WIDTH / 16) + col0 / 16) * 256; }
};
// The same where a product leaves the transpose of the tile: so it lies.
template <int ROWS, int WIDTH> struct TransposedAccumTile {
  static constexpr int size = ROWS * WIDTH, cols = WIDTH;
  float* base;
  static OP constexpr int offset(int row0, int col0) { return AccumTile<WIDTH, ROWS>::offset(col0, row0); }
};

// Calls move(four registers of a lane, their place) for all of a fragment that lies at (row0, col0) of a tile.
template <int ROWS, int WIDTH, typename Fragment, typename Move>
OP void for_accum(AccumTile<ROWS, WIDTH> tile, Fragment& acc, int row0, int col0, Move move) {
  float* const first = tile.base + tile.offset(row0, col0);
  for_lane(l) {
    float* const own = first + l * 4;
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 4)
      move(&acc.at(l, r), own + tile.offset(r / acc.per_16_rows * 16, r % acc.per_16_rows / 8 * 16) + r % 8 / 4 * 128);
  }
}

// tile[row0 :, col0 :] = acc
template <int ROWS, int WIDTH, int M, int N> OP void store(AccumTile<ROWS, WIDTH> tile, const Acc<M, N>& acc, int row0, int col0) {
  for_accum(tile, acc, row0, col0, [](const float* from, float* to) {
    count_written(sizeof(Four));
    *reinterpret_cast<Four*>(to) = Four{from[0], from[1], from[2], from[3]};
  });
}

// acc = tile[row0 :, col0 :]
template <int M, int N, int ROWS, int WIDTH> OP void load(Acc<M, N>& acc, AccumTile<ROWS, WIDTH> tile, int row0, int col0) {
  for_accum(tile, acc, row0, col0, [](float* to, const float* from) {
    count_read(sizeof(Four));
    const Four four = *reinterpret_cast<const Four*>(from);
    #pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = four.x[i];
  });
}

// acc += tile[row0 :, col0 :]
template <int M, int N, int ROWS, int WIDTH> OP void add(Acc<M, N>& acc, AccumTile<ROWS, WIDTH> tile, int row0, int col0) {
  for_accum(tile, acc, row0, col0, [](float* to, const float* from) {
    count_read(sizeof(Four));
    const Four four = *reinterpret_cast<const Four*>(from);
    #pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += four.x[i];
  });
}

// The same as `load`: an element of a block has changed places with the one across, and so belongs to another lane and register.
template <int N, int ROWS, int WIDTH> OP void load(Acc<16, N>& acc, TransposedAccumTile<ROWS, WIDTH> tile, int row0, int col0) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) {
      const int row = acc.row(l, r), col = acc.col(l, r) % 16;
      const int lane = col % 8 * 4 + row % 8 / 2, reg = row / 8 * 4 + col / 8 * 2 + row % 2;
      count_read(sizeof(float));
      acc.at(l, r) = tile.base[tile.offset(row0, col0 + r / 8 * 16) + reg / 4 * 128 + lane * 4 + reg % 4];
    }
  }
}

// to = acc, as it lies in a tile, in memory that belongs to the warp
template <int N> OP void store(SharedAddress to, const Acc<16, N>& acc) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 4) store_shared(to + l * 16 + r * 128, Four{acc.at(l, r), acc.at(l, r + 1), acc.at(l, r + 2), acc.at(l, r + 3)});
  }
}

#if ON_GPU
// PTX ISA 8.1, which came with CUDA 12.1
constexpr bool RED_V4 = ARCH >= 90 && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ >= 1);
OP void red_add_v4(float* to, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
OP void red_add_v2(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" :: "l"(to), "f"(x), "f"(y) : "memory");
}
OP void red_add(float* to, float x) { asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" :: "l"(to), "f"(x) : "memory"); }
OP u32 ld_acquire(const u32* from) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
#endif

// *to += x, while other blocks add to it as well
OP void add_atomically(float* to, float x) {
  count_read(sizeof(float));
  count_written(sizeof(float));
#if ON_GPU
  red_add(to, x);
#else
  host::add_atomically(*to, x);
#endif
}

// tile[row0 :, col0 :] += acc, while other blocks add to it as well
template <int ROWS, int WIDTH, int M, int N> OP void add(AccumTile<ROWS, WIDTH> tile, const Acc<M, N>& acc, int row0, int col0) {
  for_accum(tile, acc, row0, col0, [](const float* from, float* to) {
    count_read(sizeof(Four));
    count_written(sizeof(Four));
#if ON_GPU
    if constexpr (RED_V4) {
      red_add_v4(to, from);
    } else {
      #pragma unroll
      for (int i = 0; i < 4; ++i) red_add(to + i, from[i]);
    }
#else
    for (int i = 0; i < 4; ++i) host::add_atomically(to[i], from[i]);
#endif
  });
}

// tile = 0, by all threads of a block
template <int ROWS, int WIDTH> OP void clear(AccumTile<ROWS, WIDTH> tile) {
  for_lane(l) {
    for (int i = (warp_id() * 32 + l) * 4; i < tile.size; i += 32 * WARPS * 4) {
      count_written(sizeof(Four));
      *reinterpret_cast<Four*>(tile.base + i) = Four{};
    }
  }
}

// sums[begin : end] = 0, multiples of 128, by a warp, whose lanes then meet: one of them may tell other blocks
OP void clear(float* sums, u32 begin, u32 end) {
  #pragma unroll 4
  for (u32 i = begin; i < end; i += 128) {
    for_lane(l) {
      count_written(sizeof(Four));
      *reinterpret_cast<Four*>(sums + i + l * 4) = Four{};
    }
  }
  sync_warp();
}

// Blocks that have to add in order count those that have. Called by one warp: returns when `mine` others are done, and what they added
// is then visible to it and to the warps that meet it at a barrier. Only blocks of lower numbers may come before: a GPU starts blocks in
// the order of their numbers, so that those are running or done.
#if ON_GPU
OP void semaphore_wait(const u32* semaphore, u32 mine) {
  while (ld_acquire(semaphore) != mine) {}
}
// The same for a counter that others may have counted up further.
OP void wait_for_count(const u32* counter, u32 least) {
  while (ld_acquire(counter) < least) {}
}
#else
OP void semaphore_wait(const u32* semaphore, u32 mine, CallSite at = call_site()) { host::self->wait_for(*semaphore, mine, false, at); }
OP void wait_for_count(const u32* counter, u32 least, CallSite at = call_site()) { host::self->wait_for(*counter, least, true, at); }
#endif
// Counts a block that has ended at each of `heads` counters, at most 32. By one warp, when all additions of the block have been made. Bits of
// `others`, in shared memory: at which of them some of so many blocks have not been counted yet. Where none is left, what all of them
// have added is visible to the warp, and to warps that it tells so.
OP void count_block(u32* counters, int heads, u32 blocks, SharedAddress others) {
#if ON_GPU
  u32 before = 0;
  if (lane_id() < heads)
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + lane_id()) : "memory");
  const u32 bits = __ballot_sync(0xffffffffu, before + 1 < blocks);
  if (lane_id() == 0) store_shared(others, bits);
#else
  u32 bits = 0;
  for (int i = 0; i < heads; ++i) bits |= u32(host::self->count_up<__ATOMIC_ACQ_REL>(counters[i]) < blocks) << i;
  store_shared(others, bits);
#endif
}
// The same where no block has to know whether it is the last one.
OP void count_block(u32* counters, int heads) {
#if ON_GPU
  if (lane_id() < heads) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counters + lane_id()) : "memory");
#else
  for (int i = 0; i < heads; ++i) host::self->count_up<__ATOMIC_RELEASE>(counters[i]);
#endif
}
// Counts one up, by one warp, and says how many there were before.
OP u32 count_up(u32* counter) {
#if ON_GPU
  u32 before = 0;
  if (lane_id() == 0) asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return __shfl_sync(0xffffffffu, before, 0);
#else
  return host::self->count_up<__ATOMIC_RELAXED>(*counter) - 1;
#endif
}
OP void semaphore_clear(u32* semaphore) {
  for_lane(l) if (l == 0) *semaphore = 0;
}
// Called by one warp after a barrier behind the additions of all warps.
OP void semaphore_release(u32* semaphore) {
#if ON_GPU
  if (lane_id() == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(semaphore) : "memory");
#else
  host::self->count_up<__ATOMIC_RELEASE>(*semaphore);
#endif
}

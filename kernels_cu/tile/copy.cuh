// copy.cuh -- tiles between device memory and shared memory. The scope in the name says which threads share the work.
#pragma once
#include "params.cuh"
#include "tile/shared.cuh"

// rows x cols elements in device memory; what lies beyond is not touched
struct GlobalTile {
  Element* base;
  i64 row_stride, col_stride;
  int rows, cols;
  OP Element* at(int row, int col) const { return base + row * row_stride + col * col_stride; }
  OP GlobalTile from_row(int row) const { return {base + row * row_stride, row_stride, col_stride, rows - row, cols}; }
};

// elements from the start of a tensor to [batch, head, row, 0]
OP i64 offset_of(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row) {
  i64 offset = head * t.head_stride + row * t.row_stride;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) offset += batch[i] * t.batch_stride[i];
  return offset;
}
// tensor[batch, head] from `row` on; the tensor has `len` rows
OP GlobalTile slice(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row, int len, int cols) {
  return {static_cast<Element*>(t.data) + offset_of(t, batch, head, row), t.row_stride, t.col_stride, len - row, cols};
}
// the same of a tensor without columns
OP float* row_slice(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row) {
  return static_cast<float*>(t.data) + offset_of(t, batch, head, row);
}

// Copies BYTES to shared memory, or zeros without reading if `skip`.
#if ON_GPU
template <int BYTES> OP void cp_async(SharedAddress dst, const void* src, bool skip) {
  if constexpr (BYTES == 16)
    asm volatile("{ .reg .pred skip; setp.ne.b32 skip, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, skip; }"
                 :: "r"(dst), "l"(src), "r"(int(skip)) : "memory");
  else
    asm volatile("{ .reg .pred skip; setp.ne.b32 skip, %2, 0; cp.async.ca.shared.global [%0], [%1], %3, skip; }"
                 :: "r"(dst), "l"(src), "r"(int(skip)), "n"(BYTES) : "memory");
}
#else
template <int BYTES> OP void cp_async(SharedAddress dst, const void* src, bool skip) { host::self->copy_async(dst, skip ? nullptr : src, BYTES); }
#endif

// Closes a group of asynchronous copies. Groups complete in order.
OP void commit_copies() {
#if ON_GPU
  if constexpr (ARCH >= 80) asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host::self->commit_copies();
#endif
}
// Waits until this thread's copies have arrived, except those of the last `PENDING` groups.
template <int PENDING> OP void wait_for_copies() {
#if ON_GPU
  if constexpr (ARCH >= 80) asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#else
  host::self->wait_for_copies(PENDING);
#endif
}

struct Block {
  static constexpr int threads = 32 * WARPS;
  static OP int thread(int lane) { return warp_id() * 32 + lane; }
};
struct Warp {
  static constexpr int threads = 32;
  static OP int thread(int lane) { return lane; }
};

// What moves at once: COPY_BYTES, or one element. The planner picks a size that divides every row, so a granule exists or does not.
template <int BYTES> struct alignas(BYTES) Vector { u32 words[BYTES / 4]; };
template <> struct Vector<0> { Element element; };
typedef Vector<COPY_BYTES> Granule;
constexpr int GRANULE = sizeof(Granule) / sizeof(Element);

// Calls move(in_tile, in_global, exists) for the two places of each granule of a tile. Neighbouring lanes take neighbouring
// granules of a row, as many side by side as the largest power of two that divides the row, so that a lane keeps its columns and
// walks down the rows.
template <typename Scope, int ROWS, int WIDTH, typename Move>
OP void for_granules(SharedTile<ROWS, WIDTH> tile, const GlobalTile& global, Move move) {
  constexpr int per_row = WIDTH / GRANULE;
  constexpr int across = min_of(per_row & -per_row, Scope::threads), down = Scope::threads / across;
  for_lane(l) {
    const int first_row = Scope::thread(l) / across, first_granule = Scope::thread(l) % across;
    #pragma unroll
    for (int i = 0; i < per_row / across; ++i) {
      const int col = (first_granule + i * across) * GRANULE;
      const int rows = col < global.cols ? global.rows : 0;
      Element* in_global = global.at(first_row, col);
      #pragma unroll (ARCH >= 80 ? ceil_div(ROWS, down) : 4)    // without cp.async each copy in flight holds registers
      for (int j = 0; j < ceil_div(ROWS, down); ++j) {
        const int row0 = j * down / 8 * 8, row = first_row + j * down % 8;
        const SharedAddress in_tile = GRANULE == tile.per_chunk ? tile.chunk_at(row0, row, i * across, first_granule) : tile.at(row0 + row, col);
        if (ROWS % down == 0 || row0 + row < ROWS) move(in_tile, in_global, row0 + row < rows);
        in_global += down * global.row_stride;
      }
    }
  }
}

// tile = src, zero beyond its rows and columns. Asynchronous where the architecture and the alignment allow: complete after
// commit_copies and wait_for_copies, and then visible to the threads that meet at a barrier.
template <typename Scope, int ROWS, int WIDTH> OP void load_async(SharedTile<ROWS, WIDTH> tile, const GlobalTile& src) {
  for_granules<Scope>(tile, src, [](SharedAddress to, const Element* from, bool exists) {
    if constexpr (ARCH >= 80 && COPY_BYTES != 0) cp_async<COPY_BYTES>(to, from, !exists);
    else store_shared(to, exists ? *reinterpret_cast<const Granule*>(from) : Granule{});
  });
}

// dst = tile, clipped to its rows and columns
template <typename Scope, int ROWS, int WIDTH> OP void store(const GlobalTile& dst, SharedTile<ROWS, WIDTH> tile) {
  for_granules<Scope>(tile, dst, [](SharedAddress from, Element* to, bool exists) {
    if (exists) *reinterpret_cast<Granule*>(to) = load_shared<Granule>(from);
  });
}

// tile = acc, rounded to the element type, in memory that belongs to the warp; visible to it after sync_warp
template <int M, int N> OP void store(SharedTile<M, N> tile, const Acc<M, N>& acc) {
  sync_warp();                                                // without it a lane overwrites what its neighbours still read there
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 2) {
      const SharedAddress to = tile.at(acc.row(l, r), acc.reg_col(r), acc.col(l, 0));
      if constexpr (FAMILY == HALVES) store_shared(to, pack<Element>(acc.at(l, r), acc.at(l, r + 1)));
      else store_shared(to, acc.at(l, r)), store_shared(to + 4, acc.at(l, r + 1));
    }
  }
}

// dst[row] = rows[row], written by the one lane of each quad that holds column 0
template <int M> OP void store(float* dst, i64 stride, int len, const RowVec<M>& rows) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) if (l % 4 == 0 && rows.row(l, i) < len) dst[rows.row(l, i) * stride] = rows.at(l, i);
  }
}

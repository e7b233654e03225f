// copy.cuh -- tiles between device memory and shared memory. The scope in the name says which threads share the work.
#pragma once
#include "params.cuh"
#include "tile/shared.cuh"

// rows x cols elements in device memory; what lies beyond is not touched. Neighbouring rows are so many heads of one query, if not of one head.
template <typename T, int HEADS = 1> struct TileOf {
  T* base;
  i64 row_stride, head_stride, col_stride;
  int rows, cols;
  OP T* at(int row, int col) const { return base + u32(row) / HEADS * row_stride + u32(row) % HEADS * head_stride + col * col_stride; }
};
template <typename T> struct TileOf<T, 1> {
  T* base;
  i64 row_stride, col_stride;
  int rows, cols;
  OP T* at(int row, int col) const { return base + row * row_stride + col * col_stride; }
  OP TileOf from_row(int row) const { return {base + row * row_stride, row_stride, col_stride, rows - row, cols}; }
};
using GlobalTile = TileOf<Element>;
using ResultTile = TileOf<Result>;

// elements from the start of a tensor to [batch, head, row, 0]
OP i64 offset_of(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row) {
  i64 offset = head * t.head_stride + row * t.row_stride;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) offset += batch[i] * t.batch_stride[i];
  return offset;
}
// tensor[batch, head] from `row` on; the tensor has `len` rows
template <typename T = Element> OP TileOf<T> slice(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row, int len, int cols) {
  return {static_cast<T*>(t.data) + offset_of(t, batch, head, row), t.row_stride, t.col_stride, len - row, cols};
}
// the same where the elements of a row are neighbours
template <typename T = Element> OP TileOf<T> rows_of(const Tensor& t, const int (&batch)[BATCH_AXES], int head, int row, int len, int cols) {
  return {static_cast<T*>(t.data) + offset_of(t, batch, head, row), t.row_stride, 1, len - row, cols};
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
template <int BYTES> OP void cp_async(SharedAddress dst, const void* src, bool skip) {
  host::self->require_aligned(dst, BYTES, "cp.async");
  host::self->require_aligned(src, BYTES, "cp.async");         // also where it is skipped
  host::self->copy_async(dst, skip ? nullptr : src, BYTES);
}
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
constexpr bool ASYNCHRONOUS = ARCH >= 80 && COPY_BYTES != 0;
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
      #pragma unroll (ASYNCHRONOUS ? ceil_div(ROWS, down) : 4)  // others hold registers while they are on their way
      for (int j = 0; j < ceil_div(ROWS, down); ++j) {
        const int row0 = j * down / 8 * 8, row = first_row + j * down % 8;
        const SharedAddress in_tile = GRANULE == tile.per_chunk ? tile.chunk_at(row0, row, i * across, first_granule) : tile.at(row0 + row, col);
        if (ROWS % down == 0 || row0 + row < ROWS) move(in_tile, in_global, row0 + row < rows);
        in_global += down * global.row_stride;
      }
    }
  }
}

// What of a row is set to zero at once.
template <typename T> struct UnitOf { typedef T type; };
template <> struct UnitOf<Element> { typedef Granule type; };
// dst = 0. Lanes have neighbouring units of as many rows as they reach across.
template <typename Scope, typename T> OP void clear(const TileOf<T>& dst) {
  typedef typename UnitOf<T>::type Unit;
  constexpr int unit = sizeof(Unit) / sizeof(T);
  const int units = ceil_div(dst.cols, unit), across = max_of(min_of(units, 32), 1), down = 32 / across;
  for_lane(l) {
    const int lane = Scope::thread(l) % 32, first = lane / across;
    #pragma unroll 1
    for (int row = Scope::thread(l) / 32 * down + first; first < down && row < dst.rows; row += Scope::threads / 32 * down) {
      for (int number = lane - first * across; number < units; number += across) {
        count_written(sizeof(Unit));
        *reinterpret_cast<Unit*>(dst.at(row, number * unit)) = Unit{};
      }
    }
  }
}

// A granule to shared memory, or zeros.
OP void copy_granule(SharedAddress to, const Element* from, bool exists) {
  if constexpr (ASYNCHRONOUS) {
    cp_async<COPY_BYTES>(to, from, !exists);
  } else {
    if (exists) count_read(sizeof(Granule));
    store_shared(to, exists ? *reinterpret_cast<const Granule*>(from) : Granule{});
  }
}

// tile = src, zero beyond its rows and columns. Asynchronous where the architecture and the alignment allow: complete after
// commit_copies and wait_for_copies, and then visible to the threads that meet at a barrier.
template <typename Scope, int ROWS, int WIDTH> OP void load_async(SharedTile<ROWS, WIDTH> tile, const GlobalTile& src) {
  if constexpr (Scope::threads == 32) sync_warp();            // without it a lane overwrites what its neighbours still read there
  for_granules<Scope>(tile, src, [](SharedAddress to, const Element* from, bool exists) { copy_granule(to, from, exists); });
}

// to[0 : count] = from[0 : count], float32 words in fours, by all threads of a block. Asynchronous like the tiles.
OP void load_async(SharedAddress to, const float* from, int count) {
  for_lane(l) {
    const int i = Block::thread(l) * 4;
    if (i < count) {
      if constexpr (ARCH >= 80) {
        cp_async<16>(to + i * 4, from + i, false);
      } else {
        count_read(16);
        store_shared(to + i * 4, *reinterpret_cast<const Vector<16>*>(from + i));
      }
    }
  }
}

// dst = tile, clipped to its rows and columns
template <typename Scope, int ROWS, int WIDTH> OP void store(const GlobalTile& dst, SharedTile<ROWS, WIDTH> tile) {
  for_granules<Scope>(tile, dst, [](SharedAddress from, Element* to, bool exists) {
    if (!exists) return;
    count_written(sizeof(Granule));
    *reinterpret_cast<Granule*>(to) = load_shared<Granule>(from);
  });
}

// tile[row0 :, col0 :] = acc, rounded to the element type, in memory that belongs to the warp; visible to it after sync_warp
template <int ROWS, int WIDTH, int M, int N> OP void store(SharedTile<ROWS, WIDTH> tile, const Acc<M, N>& acc, int row0 = 0, int col0 = 0) {
  sync_warp();                                                // without it a lane overwrites what its neighbours still read there
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 2) {
      const SharedAddress to = tile.at(row0 + acc.row(l, r), col0 + acc.reg_col(r), acc.col(l, 0));
      if constexpr (FAMILY == HALVES) store_shared(to, pack<Element>(acc.at(l, r), acc.at(l, r + 1)));
      else store_shared(to, acc.at(l, r)), store_shared(to + 4, acc.at(l, r + 1));
    }
  }
}

#if ON_GPU
// to[0 : BYTES] = words by the lanes for which it is true; one element of a word, the lower one, if BYTES is 2
template <int BYTES> OP void st_global_if(void* to, const u32* words, bool stores);
template <> OP void st_global_if<16>(void* to, const u32* words, bool stores) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %5, 0; @stores st.global.v4.b32 [%0], {%1, %2, %3, %4}; }"
               :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(u32(stores)) : "memory");
}
template <> OP void st_global_if<8>(void* to, const u32* words, bool stores) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %3, 0; @stores st.global.v2.b32 [%0], {%1, %2}; }"
               :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(u32(stores)) : "memory");
}
template <> OP void st_global_if<4>(void* to, const u32* words, bool stores) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %2, 0; @stores st.global.b32 [%0], %1; }"
               :: "l"(to), "r"(words[0]), "r"(u32(stores)) : "memory");
}
template <> OP void st_global_if<2>(void* to, const u32* words, bool stores) {
  asm volatile("{ .reg .pred stores; setp.ne.u32 stores, %2, 0; @stores st.global.b16 [%0], %1; }"
               :: "l"(to), "h"(u16(words[0])), "r"(u32(stores)) : "memory");
}
#endif

// dst[:, col0 : col0 + N] = acc, rounded to 16 bits and clipped to dst. Each lane gets eight neighbouring columns from its quad, and writes
// BYTES at once. Lanes stay together, see pipeline.cuh.
template <int BYTES = sizeof(Granule), int N, int HEADS> OP void store(const TileOf<Element, HEADS>& dst, const Acc<16, N>& acc, int col0 = 0) {
  constexpr int elements = BYTES / int(sizeof(Element));
  #pragma unroll
  for (int n = 0; n < N; n += 32) {
    #pragma unroll
    for (int slot = 0; slot < RowVec<16>::slots; ++slot) {
      Regs<u32, 4> pairs;
      for_lane(l) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (n + 8 * i >= N) continue;                       // columns that there are not, nor in dst
          const int r = acc.reg(slot, n / 4 + 2 * i);
          pairs.at(l, i) = pack<Element>(acc.at(l, r), acc.at(l, r + 1));
        }
      }
      transpose_quads(pairs);
      for_lane(l) {
        const int lane = not_ahead(l), row = RowVec<16>::row(lane, slot);  // kept, addresses would take registers
        #pragma unroll
        for (int i = 0; i < 8; i += elements) {
          const int col = col0 + n + lane % 4 * 8 + i;
          const u32 shifted = pairs.at(l, i / 2) >> i % 2 * 16;
          const bool exists = row < dst.rows && col < dst.cols;
#if ON_GPU
          st_global_if<BYTES>(dst.at(row, col), elements == 1 ? &shifted : pairs.v + i / 2, exists);
#else
          if (!exists) continue;
          count_written(BYTES);
          std::memcpy(dst.at(row, col), elements == 1 ? &shifted : &pairs.at(l, i / 2), BYTES);
#endif
        }
      }
    }
  }
  sync_warp();                                                // for the assembler, which would have the lanes meet later, and more often
}

// dst[row] = rows[row], written by the one lane of each quad that holds column 0
template <int M> OP void store(float* dst, i64 stride, int len, const RowVec<M>& rows) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) {
      if (l % 4 != 0 || rows.row(l, i) >= len) continue;
      count_written(sizeof(float));
      dst[rows.row(l, i) * stride] = rows.at(l, i);
    }
  }
}
template <int M, int HEADS> OP void store(const TileOf<float, HEADS>& dst, const RowVec<M>& rows) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) {
      if (l % 4 != 0 || rows.row(l, i) >= dst.rows) continue;
      count_written(sizeof(float));
      *dst.at(rows.row(l, i), 0) = rows.at(l, i);
    }
  }
}
// rows[row] = src[row], which the warp itself has stored
template <int M> OP void load(RowVec<M>& rows, const float* src) {
  sync_warp();                                                // without it a lane reads before its neighbour has written
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) {
      if (l % 4 == 0) count_read(sizeof(float));              // the other three of a quad ask for the same word
      rows.at(l, i) = src[rows.row(l, i)];
    }
  }
}

OP float read(const float* from) { count_read(sizeof(float)); return *from; }
template <int BYTES> OP Vector<BYTES> read_vector(const float* from) { count_read(BYTES); return *reinterpret_cast<const Vector<BYTES>*>(from); }
template <typename T> OP void write(T* to, float value) { count_written(sizeof(T)); *to = from_float<T>(value); }

template <int BYTES> OP float element_of(const Vector<BYTES>& granule, int i) {
  if constexpr (BYTES == 0) return to_float(granule.element);
  else if constexpr (sizeof(Element) == 4) return bits_float(granule.words[i]);
  else return unpack<Element>(granule.words[i / 2], i % 2);
}

// Calls use(row, exists, sum over columns of a[row] * b[row]) once for each of ROWS rows, shared by the warps of a block. Rows that do
// not exist sum to 0.
template <int ROWS, int WIDTH, typename Use> OP void for_row_dots(const GlobalTile& a, const GlobalTile& b, Use use) {
  constexpr int per_row = WIDTH / GRANULE, across = min_of(per_row & -per_row, 32), down = Block::threads / across;
  #pragma unroll 4
  for (int row0 = 0; row0 < ROWS; row0 += down) {
    Regs<float, 1> sum;
    for_lane(l) {
      const int row = row0 + Block::thread(l) / across;
      sum.at(l, 0) = 0.f;
      #pragma unroll
      for (int i = 0; i < per_row / across; ++i) {
        const int col = (l % across + i * across) * GRANULE;
        if (row >= a.rows || col >= a.cols || row >= ROWS) continue;
        count_read(2 * sizeof(Granule));
        const Granule x = *reinterpret_cast<const Granule*>(a.at(row, col)), y = *reinterpret_cast<const Granule*>(b.at(row, col));
        #pragma unroll
        for (int e = 0; e < GRANULE; ++e) sum.at(l, 0) = fmaf(element_of(x, e), element_of(y, e), sum.at(l, 0));
      }
    }
    reduce_lanes<across>(sum, [](float x, float y) { return x + y; });
    for_lane(l) {
      const int row = row0 + Block::thread(l) / across;
      if (l % across == 0 && row < ROWS) use(row, row < a.rows, sum.at(l, 0));
    }
  }
}

OP float read(const GlobalTile& tile, int row, int col) {
  count_read(sizeof(Element));
  return to_float(*tile.at(row, col));
}
template <typename T> OP void write(const TileOf<T>& tile, int row, int col, float value) {
  count_written(sizeof(T));
  *tile.at(row, col) = from_float<T>(value);
}

// For each row of a tile, shared by the warps of a block: with = begin(row, whether this lane is the first of the row), then
// use(row, col, with) for each element.
template <int ROWS, typename Begin, typename Use> OP void for_rows(const GlobalTile& tile, Begin begin, Use use) {
  for (int row = warp_id(); row < min_of(ROWS, tile.rows); row += WARPS) {
    for_lane(l) {
      const auto with = begin(row, l == 0);
      for (int col = l; col < tile.cols; col += 32) use(row, col, with);
    }
  }
}

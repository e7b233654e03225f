// shared.cuh -- tiles in shared memory, their swizzle, and the loads that turn them into fragments.
#pragma once
#include "tile/fragment.cuh"

// ROWS x WIDTH elements, rows of 16-byte chunks. Eight neighbouring rows of one chunk column, which is what ldmatrix reads at
// once, lie in eight different 16-byte bank groups because the chunk index is xor-ed with the row.
template <int ROWS, int WIDTH> struct SharedTile {
  static constexpr int per_chunk = 16 / sizeof(Element);
  static constexpr int chunks = WIDTH / per_chunk;
  static constexpr int bytes = ROWS * WIDTH * int(sizeof(Element));
  static constexpr int row_bytes = chunks * 16;
  static constexpr int period = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;  // chunks that change places among themselves
  static_assert(chunks % 2 == 0, "a row is a multiple of 32 bytes");
  SharedAddress base;
  int swizzle_offset = 0;                                     // of a view that starts at a later column: what its chunks are xor-ed with

  // Rows of 128, 256 ... bytes all start in bank 0, so all three bits come from the row; rows of 64 or 192 bytes alternate
  // between two halves of the banks by themselves, and two bits suffice; rows of 32 bytes alternate among four quarters.
  static OP int pattern(int row) { return period == 8 ? row & 7 : period == 4 ? row >> 1 & 3 : row >> 2 & 1; }

  // The columns from col0 on, if no column of them that is asked for has a chunk number with a binary digit of col0's.
  OP SharedTile from_col(int col0) const {
    const int chunk0 = col0 / per_chunk;
    return {base + chunk0 / period * period * 16, chunk0 % period * 16};
  }

  // Chunk (row0 + row, chunk0 + chunk), where row0 is a multiple of 8 and the binary digits of chunk0 and chunk do not overlap.
  // With row and chunk from the lane and row0 and chunk0 constant, addresses differ by constants and one xor.
  OP SharedAddress chunk_at(int row0, int row, int chunk0, int chunk) const {
    const int lane_part = row * chunks * 16 + (pattern(row) ^ chunk % period) * 16 + chunk / period * period * 16;
    return base + ((lane_part ^ swizzle_offset ^ chunk0 % period * 16) + row0 * chunks * 16 + chunk0 / period * period * 16);
  }
  OP SharedAddress at(int row, int col) const { return at(row, 0, col); }
  // Element (row, col0 + col), where col0 is a multiple of 8 and, unless it is 0, col is below 8. Where row and col0 are constant,
  // addresses again differ by constants and one xor.
  OP SharedAddress at(int row, int col0, int col) const {
    const int chunk0 = col0 / per_chunk, chunk = col / per_chunk;
    const int swizzled = (pattern(row) ^ swizzle_offset / 16 ^ chunk0 % period ^ chunk % period) + chunk0 / period * period + chunk / period * period;
    return base + (row * chunks + swizzled) * 16 + col % per_chunk * int(sizeof(Element));
  }
};

struct alignas(8) Pair { float x[2]; };
struct alignas(16) Four { float x[4]; };

template <typename T> OP T load_shared(SharedAddress address) {
#if ON_GPU
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
#else
  host::self->require_aligned(address, alignof(T), "ld.shared");
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
#endif
}
// One float that the compiler leaves where it stands: loads without tensor cores are so many that, all moved ahead, they would spill.
OP float load_shared_here(SharedAddress address) {
#if ON_GPU
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
#else
  return load_shared<float>(address);
#endif
}
// The sum of what other threads of the block add as well; returns what there was before.
OP u32 add_shared(SharedAddress address, u32 x) {
#if ON_GPU
  return atomicAdd(static_cast<u32*>(__cvta_shared_to_generic(address)), x);
#else
  return __atomic_fetch_add(reinterpret_cast<u32*>(address), x, __ATOMIC_RELAXED);
#endif
}
// On the host the other lanes see the value after sync_warp or sync_block and, in the deferred schedule, not earlier.
template <typename T> OP void store_shared(SharedAddress address, T value) {
#if ON_GPU
  *static_cast<T*>(__cvta_shared_to_generic(address)) = value;
#else
  static_assert(sizeof value <= host::LARGEST_STORE, "it waits there until others see it");
  host::self->require_aligned(address, alignof(T), "st.shared");
  host::self->store_shared(address, &value, sizeof value);
#endif
}

// The same of one value that all lanes have, by the lane that arrives at barriers for them.
template <typename T> OP void store_once(SharedAddress address, const T& value) {
#if ON_GPU
  if (lane_id() == 0) store_shared(address, value);
#else
  store_shared(address, value);
#endif
}

// One value for all lanes, read by that lane.
template <typename T> OP T load_once(SharedAddress address) {
#if ON_GPU
  T value{};
  if (lane_id() == 0) value = load_shared<T>(address);
  return __shfl_sync(0xffffffffu, value, 0);
#else
  return load_shared<T>(address);
#endif
}

#if ON_GPU
OP void ldmatrix_x4(u32* r, SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
OP void ldmatrix_x4_trans(u32* r, SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
OP void stmatrix_x4(SharedAddress row, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#endif

// Four 8 x 8 matrices of 16-bit values into registers first ... first + 3. Lane l names row l % 8 of matrix l / 8.
// Register i of lane l receives the two values at row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1 of matrix i.
template <int N, typename Row> OP void ldmatrix(Regs<u32, N>& frag, int first, Row row) {
#if ON_GPU
  ldmatrix_x4(frag.v + first, row(lane_id()));
#else
  SharedAddress rows[32];
  for_lane(l) host::self->require_aligned(rows[l] = row(l), 16, "ldmatrix");
  for_lane(l) for (int i = 0; i < 4; ++i)
    frag.at(l, first + i) = load_shared<u32>(rows[8 * i + l / 4] + l % 4 * 4);
#endif
}

// The same with each matrix transposed: rows 2 (l % 4) and 2 (l % 4) + 1, column l / 4.
template <int N, typename Row> OP void ldmatrix_trans(Regs<u32, N>& frag, int first, Row row) {
#if ON_GPU
  ldmatrix_x4_trans(frag.v + first, row(lane_id()));
#else
  SharedAddress rows[32];
  for_lane(l) host::self->require_aligned(rows[l] = row(l), 16, "ldmatrix");
  for_lane(l) for (int i = 0; i < 4; ++i) {
    const SharedAddress *pair = rows + 8 * i + l % 4 * 2;
    frag.at(l, first + i) = load_shared<u16>(pair[0] + l / 4 * 2) | u32(load_shared<u16>(pair[1] + l / 4 * 2)) << 16;
  }
#endif
}

// a = tile[row0 : row0 + M, k0 : k0 + STEP_K]
template <int M, int ROWS, int WIDTH> OP void load(OperandA<M>& a, SharedTile<ROWS, WIDTH> tile, int row0, int k0) {
  if constexpr (FAMILY == REPLICATED) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < a.regs; ++r) a.at(l, r) = load_shared_here(tile.at(row0 + a.row(l, r), k0, a.k(l, r)));
    }
  } else {
    #pragma unroll
    for (int m = 0; m < M; m += 16)
      ldmatrix(a, m / 4, [=](int l) { return tile.chunk_at(row0 + m, l % 16, k0 / tile.per_chunk, l / 16); });
  }
}

// b = tile[n0 : n0 + STEP_N, k0 : k0 + STEP_K] transposed: the B operand of Q K^T
template <int ROWS, int WIDTH> OP void load_transposed(OperandB<>& b, SharedTile<ROWS, WIDTH> tile, int n0, int k0) {
  if constexpr (FAMILY == REPLICATED) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < b.regs; ++r) b.at(l, r) = load_shared_here(tile.at(n0 + b.n(l, r), k0, b.k(l, r)));
    }
  } else {
    ldmatrix(b, 0, [=](int l) { return tile.chunk_at(n0, l % 8 + l / 16 * 8, k0 / tile.per_chunk, l / 8 % 2); });
  }
}

// b = tile[k0 : k0 + STEP_K, n0 : n0 + STEP_N]: the B operand of P V.
// In the tf32 family inner index t stands for key 2 t and t + 4 for key 2 t + 1, which is how an accumulator holds P.
template <int ROWS, int WIDTH> OP void load(OperandB<>& b, SharedTile<ROWS, WIDTH> tile, int k0, int n0) {
  if constexpr (FAMILY == REPLICATED) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < b.regs; ++r) b.at(l, r) = load_shared_here(tile.at(k0 + b.k(l, r), n0 + r / 2 % 2 * 8, b.n(l, r) % 8));
    }
  } else if constexpr (FAMILY == TF32) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < 4; ++r) {
        const SharedAddress chunk = tile.chunk_at(k0, l % 4 * 2 + r % 2, n0 / 4 + r / 2 * 2, l / 16);
        b.at(l, r) = load_shared<u32>(chunk + l / 4 % 4 * 4);
      }
    }
  } else {
    ldmatrix_trans(b, 0, [=](int l) { return tile.chunk_at(k0, l % 16, n0 / tile.per_chunk, l / 16); });
  }
}

// a = s[:, k0 : k0 + STEP_K], rounded to the element type: P as the A operand of P V, without leaving the registers
template <int M, int N> OP void to_operand(OperandA<M>& a, const Acc<M, N>& s, int k0) {
  #pragma unroll
  for (int m = 0; m < M / 16; ++m) {
    const int from = m * s.per_16_rows + k0 / 2, to = m * a.regs_per_16_rows;
    if constexpr (FAMILY == HALVES) {
      for_lane(l) {
        #pragma unroll
        for (int r = 0; r < 4; ++r) a.at(l, to + r) = pack<Element>(s.at(l, from + 2 * r), s.at(l, from + 2 * r + 1));
      }
    } else if constexpr (FAMILY == TF32) {
      for_lane(l) {
        #pragma unroll
        for (int r = 0; r < 4; ++r) a.at(l, to + r) = float_bits(s.at(l, from + r % 2 * 2 + r / 2));
      }
    } else {
      #pragma unroll
      for (int r = 0; r < 16; ++r) from_quad(a, to + r, s, from + r / 8 * 2 + r % 2, r % 8 / 2);
    }
  }
}

// p_reg[i] = s[:, i * STEP_K : (i + 1) * STEP_K]
template <int M, int N> OP void to_operands(OperandA<M> (&p_reg)[N / STEP_K], const Acc<M, N>& s) {
  #pragma unroll
  for (int i = 0; i < N / STEP_K; ++i) to_operand(p_reg[i], s, i * STEP_K);
}

// scope.cuh -- the one place that knows what a lane is, and on which of two machines the code runs.
//
//   GPU   a warp operation runs once per lane; `for_lane` binds the lane's own id; a fragment holds the lane's own registers.
//   host  a warp operation runs once per warp, which is an OS thread; `for_lane` walks 32 lanes; a fragment holds all their registers.
//
// Code written with `for_lane` has one body. Only what crosses lanes or warps has two.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define ON_GPU 1
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define OP __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define CLUSTERS_OF(blocks) __cluster_dims__(blocks)
#define GRID_CONSTANT const __grid_constant__
#define for_lane(lane) if (const int lane = lane_id(); true)
#else
#define ON_GPU 0
#include <cmath>
#include <cstdint>
#include <cstring>
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
#define OP inline
#define KERNEL(threads, blocks) extern "C" void
#define CLUSTERS_OF(blocks)
#define GRID_CONSTANT const
#define for_lane(lane) if (const host::Lanes lanes_of_warp{call_site()}; true) for (int lane = 0; lane < 32; ++lane)
#include "tile/host.cuh"
#endif

// N registers of type T in every lane. On the host they start as NaN, so that a read before a write shows in the result.
#if ON_GPU
OP int lane_id() { return threadIdx.x & 31; }
template <typename T, int N> struct Regs {
  T v[N];
  OP T& at(int, int r) { return v[r]; }
  OP const T& at(int, int r) const { return v[r]; }
};
#else
template <typename T, int N> struct Regs {
  T v[32][N];
  Regs() { std::memset(v, 0xff, sizeof v); }
  T& at(int lane, int r) { return v[lane][r]; }
  const T& at(int lane, int r) const { return v[lane][r]; }
};
#endif

// Where an operation is called, for the reports of the host: the default of a last parameter.
#if ON_GPU
struct CallSite {};
OP CallSite call_site() { return {}; }
#else
using host::CallSite;
OP CallSite call_site(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
#endif

constexpr int NAMED_BARRIERS = 16;                            // that a block has: 0 is that of sync_block, and each kernel names those that it uses besides
#if ON_GPU
OP int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
// Asked again, it is computed again, and so is what follows from it: nothing of it has to wait in registers.
OP u32 block_id() {
  u32 id;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(id));
  return id;
}
OP u32 blocks() { return gridDim.x; }
// Shared memory is addressed by 32-bit integers on the GPU, so that constant offsets fold into the instructions.
typedef u32 SharedAddress;
OP SharedAddress shared_memory() { extern __shared__ __align__(1024) char arena[]; return u32(__cvta_generic_to_shared(arena)); }
OP void sync_block() { __syncthreads(); }
OP void sync_warp() { __syncwarp(); }
// One warp tells the other that names the same barrier what it has written, and goes on; the other waits to be told.
OP void arrive_pair(int name) { asm volatile("bar.arrive %0, 64;" :: "r"(name) : "memory"); }
OP void sync_pair(int name) { asm volatile("bar.sync %0, 64;" :: "r"(name) : "memory"); }
// The same of two warpgroups.
OP void arrive_two_groups(int name) { asm volatile("bar.arrive %0, 256;" :: "r"(name) : "memory"); }
OP void sync_two_groups(int name) { asm volatile("bar.sync %0, 256;" :: "r"(name) : "memory"); }
// Ping-pong: each warpgroup waits until the one before it lets it go, the first one until the last one does, which so begins. The barrier of
// the first one is FIRST.
template <int FIRST> OP void wait_pingpong(int group) { asm volatile("bar.sync %0, 256;" :: "r"(FIRST + group) : "memory"); }
template <int FIRST> OP void arrive_pingpong(int group, int groups) { asm volatile("bar.arrive %0, 256;" :: "r"(FIRST + (group + 1) % groups) : "memory"); }
// The first, or the last, so many warps of a block wait for each other.
template <int FIRST> OP void sync_first(int name) { asm volatile("bar.sync %0, %1;" :: "r"(name), "n"(32 * FIRST) : "memory"); }
template <int LAST> OP void sync_last(int name) { asm volatile("bar.sync %0, %1;" :: "r"(name), "n"(32 * LAST) : "memory"); }
OP bool barrier_red_or(int name, int threads, bool flag) {
  u32 any;
  asm volatile("{ .reg .pred flag, any; setp.ne.u32 flag, %3, 0; barrier.cta.red.or.pred any, %1, %2, flag; selp.u32 %0, 1, 0, any; }"
               : "=r"(any) : "r"(name), "r"(threads), "r"(u32(flag)) : "memory");
  return any;
}
#else
OP int warp_id(CallSite at = call_site()) { host::ask_warp(at); return host::self->warp; }
OP u32 block_id() { return host::self->block_id; }
OP u32 blocks() { return host::self->blocks; }
typedef char* SharedAddress;
OP SharedAddress shared_memory() { return host::self->shared; }
OP void sync_block(CallSite at = call_site()) { host::sync_block(at); }
OP void sync_warp(CallSite at = call_site()) { host::ask_warp(at); host::self->publish_stores(); }
OP void arrive_pair(int name) { host::arrive_named(name, 2); }
OP void sync_pair(int name, CallSite at = call_site()) { host::sync_named(name, 2, "the other warp of the pair", at); }
OP void arrive_two_groups(int name) { host::arrive_named(name, 8); }
OP void sync_two_groups(int name, CallSite at = call_site()) { host::sync_named(name, 8, "the other warpgroup", at); }
template <int FIRST> OP void wait_pingpong(int group, CallSite at = call_site()) { host::sync_named(FIRST + group, 8, "the warpgroup before it", at); }
template <int FIRST> OP void arrive_pingpong(int group, int groups) { host::arrive_named(FIRST + (group + 1) % groups, 8); }
template <int FIRST> OP void sync_first(int name, CallSite at = call_site()) { host::sync_named(name, FIRST, "the other warps that load", at); }
template <int LAST> OP void sync_last(int name, CallSite at = call_site()) { host::sync_named(name, LAST, "the other warps that compute", at); }
#endif

// All of x is computed when this is reached, and read again after it: compilers otherwise move arithmetic past waits, and products of
// warpgroups use registers that a compiler knows nothing of.
template <int N> OP void pin(Regs<float, N>& x) {
#if ON_GPU
  #pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x.v[i]) :: "memory");
#endif
}
template <int N> OP void pin(Regs<u32, N>& x) {
#if ON_GPU
  #pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x.v[i]) :: "memory");
#endif
}

// x, but computed where it stands: what follows from it is neither computed ahead of a loop nor kept in registers all along.
OP int not_ahead(int x) {
#if ON_GPU
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Two numbers of a lane in two neighbouring registers, which lie in different banks, as two that a compiler chooses may not. It keeps 64 bits in such
// two if an instruction needs them at once. This one is never executed: `positive` is, which no compiler knows.
#if ON_GPU
typedef u64 RegisterPair;
OP u64 pack_b64(float low, float high) {
  u64 x;
  asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "f"(low), "f"(high));
  return x;
}
OP void unpack_b64(float& low, float& high, u64 x) { asm volatile("mov.b64 {%0, %1}, %2;" : "=f"(low), "=f"(high) : "l"(x)); }
OP void load_shared_if_0(u64& x, u32 address) {
  asm volatile("{ .reg .pred loads; setp.eq.u32 loads, %1, 0; @loads ld.shared.b64 %0, [%1]; }" : "+l"(x) : "r"(address));
}
OP RegisterPair side_by_side(const Regs<float, 2>& x, int positive) {
  u64 both = pack_b64(x.v[0], x.v[1]);
  load_shared_if_0(both, positive);
  return both;
}
OP void apart(Regs<float, 2>& x, RegisterPair both) { unpack_b64(x.v[0], x.v[1], both); }
#else
typedef Regs<float, 2> RegisterPair;
OP RegisterPair side_by_side(const Regs<float, 2>& x, int) { return x; }
OP void apart(Regs<float, 2>& x, const RegisterPair& both) { x = both; }
#endif

// At the end of one of two branches that do alike: compilers otherwise make one text of both, and choose between addresses before each load.
OP void stay_apart() {
#if ON_GPU
  asm volatile("// the end of a branch that stays apart" ::: "memory");
#endif
}

// x, which is the same in every lane, moved to where a warp keeps one value for all lanes: what follows from it takes no lane's work.
template <typename T> OP T uniform(T x, [[maybe_unused]] CallSite at = call_site()) {  // a template: before sm_80 there is no such instruction
#if ON_GPU
  return __reduce_max_sync(0xffffffffu, x);
#else
  host::ask_warp(at);
  return x;
#endif
}

// On the host: bytes that the calling warp read from or wrote to device memory, and operations of its matrix products.
#if ON_GPU
OP void count_read(int) {}
OP void count_written(int) {}
OP void count_flops(int) {}
#else
OP void count_read(int bytes) { host::self->counts.read_bytes += bytes; }
OP void count_written(int bytes) { host::self->counts.written_bytes += bytes; }
OP void count_flops(int flops) { host::self->count_flops(flops); }
#endif

// true in every lane if any lane's flag is set
OP bool warp_any(const Regs<bool, 1>& flag) {
#if ON_GPU
  return __any_sync(0xffffffffu, flag.v[0]);
#else
  for_lane(l) if (flag.at(l, 0)) return true;
  return false;
#endif
}

// the least, or the greatest, integer of all lanes; templates, as `uniform`
template <typename T> OP T redux_min(const Regs<T, 1>& x) {
#if ON_GPU
  return __reduce_min_sync(0xffffffffu, x.v[0]);
#else
  T least = x.at(0, 0);
  for_lane(l) least = x.at(l, 0) < least ? x.at(l, 0) : least;
  return least;
#endif
}
template <typename T> OP T redux_max(const Regs<T, 1>& x) {
#if ON_GPU
  return __reduce_max_sync(0xffffffffu, x.v[0]);
#else
  T greatest = x.at(0, 0);
  for_lane(l) greatest = x.at(l, 0) > greatest ? x.at(l, 0) : greatest;
  return greatest;
#endif
}

// every bit that is 1 in a lane
template <typename T> OP T redux_or(const Regs<T, 1>& x) {
#if ON_GPU
  return __reduce_or_sync(0xffffffffu, x.v[0]);
#else
  T all = 0;
  for_lane(l) all |= x.at(l, 0);
  return all;
#endif
}

// the number of the lowest bit that is 1, of the zeros above the highest, and of ones
OP int lowest_bit(u32 x) {
#if ON_GPU
  return __ffs(x) - 1;
#else
  return __builtin_ctz(x);
#endif
}
OP int zeros_above(u32 x) {
#if ON_GPU
  return __clz(x);
#else
  return __builtin_clz(x);
#endif
}
OP int ones(u32 x) {
#if ON_GPU
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}
// bit i is the flag of lane i
OP u32 warp_ballot(const Regs<bool, 1>& flag) {
#if ON_GPU
  return __ballot_sync(0xffffffffu, flag.v[0]);
#else
  u32 bits = 0;
  for_lane(l) bits |= u32(flag.at(l, 0)) << l;
  return bits;
#endif
}

// a flag that no lane has set
OP Regs<bool, 1> none() {
  Regs<bool, 1> flag;
  for_lane(l) flag.at(l, 0) = false;
  return flag;
}
// the flag of each lane, if either is set
OP Regs<bool, 1> either(const Regs<bool, 1>& a, const Regs<bool, 1>& b) {
  Regs<bool, 1> any;
  for_lane(l) any.at(l, 0) = a.at(l, 0) || b.at(l, 0);
  return any;
}

// true in every lane of a warpgroup if any lane's flag is set; its warps meet at the barrier of this name
OP bool warpgroup_any(int name, const Regs<bool, 1>& flag, [[maybe_unused]] CallSite at = call_site()) {
#if ON_GPU
  return warp_any({barrier_red_or(name, 128, flag.v[0])});                       // which tells the compiler that lanes agree
#else
  return host::any_named(name, 4, warp_any(flag), "the other warps of its warpgroup", at);
#endif
}

// What lane `lane` has, which each lane may ask of another one.
template <typename T> OP T value_of_lane(const Regs<T, 1>& x, int lane) {
#if ON_GPU
  return __shfl_sync(0xffffffffu, x.v[0], lane);
#else
  return x.at(lane % 32, 0);
#endif
}

// dst[d] = the value of src[s] in lane `member` of each quad (the four lanes that share a fragment row)
template <int N, int M> OP void from_quad(Regs<float, N>& dst, int d, const Regs<float, M>& src, int s, int member) {
#if ON_GPU
  dst.v[d] = __shfl_sync(0xffffffffu, src.v[s], (lane_id() & ~3) | member);
#else
  for_lane(l) dst.at(l, d) = src.at((l & ~3) | member, s);
#endif
}

// value j of lane i of each quad becomes value i of lane j
OP void transpose_quads(Regs<u32, 4>& x) {
#if ON_GPU
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = not_ahead(lane_id()) & step;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 other = __shfl_xor_sync(0xffffffffu, upper ? x.v[i] : x.v[i + step], step);
      x.v[i] = upper ? other : x.v[i];
      x.v[i + step] = upper ? x.v[i + step] : other;
    }
  }
#else
  const Regs<u32, 4> before = x;
  for_lane(l) for (int i = 0; i < 4; ++i) x.at(l, i) = before.at((l & ~3) | i, l % 4);
#endif
}

// Each word of the lanes is a matrix of 8 x 8 elements of 16 bits, of which lane 4 i + j has numbers 2 j and 2 j + 1 of row i. It becomes its transpose.
template <int N> OP void movmatrix(Regs<u32, N>& x) {
#if ON_GPU
  #pragma unroll
  for (int r = 0; r < N; ++r) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x.v[r]));
#else
  const Regs<u32, N> before = x;
  const auto element = [&](int row, int col, int r) { return before.at(row * 4 + col / 2, r) >> col % 2 * 16 & 0xffff; };
  for_lane(l) for (int r = 0; r < N; ++r) x.at(l, r) = element(l % 4 * 2, l / 4, r) | element(l % 4 * 2 + 1, l / 4, r) << 16;
#endif
}

// Lanes that are STEP apart, a power of 2, have each other's values.
template <int STEP, int N> OP void exchange_lanes(Regs<u32, N>& x) {
#if ON_GPU
  #pragma unroll
  for (int i = 0; i < N; ++i) x.v[i] = __shfl_xor_sync(0xffffffffu, x.v[i], STEP);
#else
  const Regs<u32, N> before = x;
  for_lane(l) for (int i = 0; i < N; ++i) x.at(l, i) = before.at(l ^ STEP, i);
#endif
}

// every lane of a group of LANES neighbours ends with the group's combined value; with FIRST above 1, of each FIRST-th lane of the group
template <int LANES, int FIRST = 1, typename T, int N, typename F> OP void reduce_lanes(Regs<T, N>& x, F combine) {
#if ON_GPU
  #pragma unroll
  for (int r = 0; r < N; ++r)
    #pragma unroll
    for (int step = FIRST; step < LANES; step *= 2) x.v[r] = combine(x.v[r], __shfl_xor_sync(0xffffffffu, x.v[r], step));
#else
  for (int step = FIRST; step < LANES; step *= 2) {
    const Regs<T, N> before = x;
    for_lane(l) for (int r = 0; r < N; ++r) x.at(l, r) = combine(before.at(l, r), before.at(l ^ step, r));
  }
#endif
}
// the same for a quad, the four lanes that share a fragment row
template <int N, typename F> OP void quad_reduce(Regs<float, N>& x, F combine) { reduce_lanes<4>(x, combine); }

template <typename T> OP constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <typename T> OP constexpr T max_of(T a, T b) { return a > b ? a : b; }
OP constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

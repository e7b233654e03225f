// wgmma.cuh -- products of a warpgroup: four warps of 16 rows each. The B operand lies in shared memory, the A operand there too or
// in registers. A product is started, runs beneath what follows, and is waited for.
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".) Accumulators and A operands are laid out as those of mma.sync.
#pragma once
#include "tile/panel.cuh"

#if ON_GPU
// Where an operand lies (PTX ISA, "Matrix Descriptor Format"), low word: its start, and the distance from panel to panel of 64 columns, which
// is read where rows are the inner extent; one more is 16 bytes further. The high word is the same for all: 1024 bytes from eight rows to
// the next eight, and the 128-byte swizzle. Apart, because a 64-bit sum for each instruction keeps the tensor cores waiting.
// CUTS_ADDRESSES, which the file that includes this one says: to 18 bits, more than they have.
OP u32 descriptor(SharedAddress start, int panel_bytes) {
  if constexpr (CUTS_ADDRESSES) return (start & 0x3ffff) >> 4 | u32(panel_bytes >> 4) << 16;
  else return (start >> 4) + (u32(panel_bytes >> 4) << 16);
}
#define DESCRIPTOR_OF(name, low, high) ".reg .b64 " name "; mov.b64 " name ", {" low ", " high "}; "
#define DESCRIPTOR(name, low) DESCRIPTOR_OF(name, low, "0x40000040")

// An asm statement has no loops. These spell the registers of an accumulator of N columns, as text and as operands, by tens.
#define TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define OF_TEN(d, t) \
  "+f"(d[t##0]), "+f"(d[t##1]), "+f"(d[t##2]), "+f"(d[t##3]), "+f"(d[t##4]), "+f"(d[t##5]), "+f"(d[t##6]), "+f"(d[t##7]), "+f"(d[t##8]), "+f"(d[t##9])
#define OF_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA(N, type, d, descriptors, operands, add, transposed) \
  "{ .reg .pred add; setp.ne.b32 add, " add ", 0; " descriptors \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" d "}, " operands ", add, 1, 1, " transposed "; }"
#define D_32 TEN() "%10, %11, %12, %13, %14, %15"
#define OF_D_32 OF_TEN(d, ), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define D_64 TEN() TEN(1) TEN(2) "%30, %31"
#define OF_D_64 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), "+f"(d[30]), "+f"(d[31])
#define D_80 TEN() TEN(1) TEN(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define OF_D_80 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), \
  "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define D_96 TEN() TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define OF_D_96 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define D_112 TEN() TEN(1) TEN(2) TEN(3) TEN(4) "%50, %51, %52, %53, %54, %55"
#define OF_D_112 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), \
  "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define D_128 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#define OF_D_128 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define D_144 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) "%70, %71"
#define OF_D_144 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), \
  "+f"(d[70]), "+f"(d[71])
#define D_160 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define OF_D_160 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), \
  "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define D_176 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) "%80, %81, %82, %83, %84, %85, %86, %87"
#define OF_D_176 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), OF_TEN(d, 7), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define D_192 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90, %91, %92, %93, %94, %95"
#define OF_D_192 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), OF_TEN(d, 7), \
  OF_TEN(d, 8), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define D_256 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define OF_D_256 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), OF_TEN(d, 7), \
  OF_TEN(d, 8), OF_TEN(d, 9), OF_TEN(d, 10), OF_TEN(d, 11), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// d = a b^T + (add ? d : 0): 16 columns of 64 rows of a, 16 columns of N rows of b
template <int N> OP void wgmma_ss(float* d, u32 a, u32 b, int add);
// d = a b + (add ? d : 0): 16 columns of 64 rows of a, 16 rows of N columns of b
template <int N> OP void wgmma_ss_b_mn(float* d, u32 a, u32 b, int add);
// d = a^T b^T + (add ? d : 0): 16 rows of 64 columns of a, 16 columns of N rows of b
template <int N> OP void wgmma_ss_a_mn(float* d, u32 a, u32 b, int add);
// the same as the second with a in registers
template <int N> OP void wgmma_rs(float* d, const u32* a, u32 b, int add);
// d += a b^T: eight columns, twice, of eight rows of a, eight times, and of N rows of b, in rows of 16 bytes, one behind the other; both are
// bfloat16, whatever elements are
template <int N> OP void wgmma_ss_terms(float* d, u32 a, u32 b);
template <> OP void wgmma_ss<64>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(64, "f16", D_64, DESCRIPTOR("a", "%32") DESCRIPTOR("b", "%33"), "a, b", "%34", "0, 0") : OF_D_64 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR("a", "%32") DESCRIPTOR("b", "%33"), "a, b", "%34", "0, 0") : OF_D_64 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<80>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(80, "f16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "0, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(80, "bf16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "0, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<96>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(96, "f16", D_96, DESCRIPTOR("a", "%48") DESCRIPTOR("b", "%49"), "a, b", "%50", "0, 0") : OF_D_96 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(96, "bf16", D_96, DESCRIPTOR("a", "%48") DESCRIPTOR("b", "%49"), "a, b", "%50", "0, 0") : OF_D_96 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<112>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(112, "f16", D_112, DESCRIPTOR("a", "%56") DESCRIPTOR("b", "%57"), "a, b", "%58", "0, 0") : OF_D_112 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(112, "bf16", D_112, DESCRIPTOR("a", "%56") DESCRIPTOR("b", "%57"), "a, b", "%58", "0, 0") : OF_D_112 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<128>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(128, "f16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 0") : OF_D_128 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 0") : OF_D_128 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<144>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(144, "f16", D_144, DESCRIPTOR("a", "%72") DESCRIPTOR("b", "%73"), "a, b", "%74", "0, 0") : OF_D_144 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(144, "bf16", D_144, DESCRIPTOR("a", "%72") DESCRIPTOR("b", "%73"), "a, b", "%74", "0, 0") : OF_D_144 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<160>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(160, "f16", D_160, DESCRIPTOR("a", "%80") DESCRIPTOR("b", "%81"), "a, b", "%82", "0, 0") : OF_D_160 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(160, "bf16", D_160, DESCRIPTOR("a", "%80") DESCRIPTOR("b", "%81"), "a, b", "%82", "0, 0") : OF_D_160 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<176>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(176, "f16", D_176, DESCRIPTOR("a", "%88") DESCRIPTOR("b", "%89"), "a, b", "%90", "0, 0") : OF_D_176 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(176, "bf16", D_176, DESCRIPTOR("a", "%88") DESCRIPTOR("b", "%89"), "a, b", "%90", "0, 0") : OF_D_176 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<192>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(192, "f16", D_192, DESCRIPTOR("a", "%96") DESCRIPTOR("b", "%97"), "a, b", "%98", "0, 0") : OF_D_192 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(192, "bf16", D_192, DESCRIPTOR("a", "%96") DESCRIPTOR("b", "%97"), "a, b", "%98", "0, 0") : OF_D_192 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<256>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(256, "f16", D_256, DESCRIPTOR("a", "%128") DESCRIPTOR("b", "%129"), "a, b", "%130", "0, 0") : OF_D_256 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(256, "bf16", D_256, DESCRIPTOR("a", "%128") DESCRIPTOR("b", "%129"), "a, b", "%130", "0, 0") : OF_D_256 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_b_mn<32>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(32, "f16", D_32, DESCRIPTOR("a", "%16") DESCRIPTOR("b", "%17"), "a, b", "%18", "0, 1") : OF_D_32 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(32, "bf16", D_32, DESCRIPTOR("a", "%16") DESCRIPTOR("b", "%17"), "a, b", "%18", "0, 1") : OF_D_32 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_b_mn<64>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(64, "f16", D_64, DESCRIPTOR("a", "%32") DESCRIPTOR("b", "%33"), "a, b", "%34", "0, 1") : OF_D_64 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR("a", "%32") DESCRIPTOR("b", "%33"), "a, b", "%34", "0, 1") : OF_D_64 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_b_mn<128>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(128, "f16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 1") : OF_D_128 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 1") : OF_D_128 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_a_mn<80>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(80, "f16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "1, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(80, "bf16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "1, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<64>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(64, "f16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "1") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "1") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<96>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(96, "f16", D_96, DESCRIPTOR("b", "%52"), "{%48, %49, %50, %51}, b", "%53", "1") : OF_D_96 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(96, "bf16", D_96, DESCRIPTOR("b", "%52"), "{%48, %49, %50, %51}, b", "%53", "1") : OF_D_96 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<128>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(128, "f16", D_128, DESCRIPTOR("b", "%68"), "{%64, %65, %66, %67}, b", "%69", "1") : OF_D_128 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR("b", "%68"), "{%64, %65, %66, %67}, b", "%69", "1") : OF_D_128 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<192>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(192, "f16", D_192, DESCRIPTOR("b", "%100"), "{%96, %97, %98, %99}, b", "%101", "1") : OF_D_192 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(192, "bf16", D_192, DESCRIPTOR("b", "%100"), "{%96, %97, %98, %99}, b", "%101", "1") : OF_D_192 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<256>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(256, "f16", D_256, DESCRIPTOR("b", "%132"), "{%128, %129, %130, %131}, b", "%133", "1") : OF_D_256 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(256, "bf16", D_256, DESCRIPTOR("b", "%132"), "{%128, %129, %130, %131}, b", "%133", "1") : OF_D_256 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_terms<64>(float* d, u32 a, u32 b) {
  asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR_OF("a", "%32", "0") DESCRIPTOR_OF("b", "%33", "8"), "a, b", "1", "0, 0") : OF_D_64 : "r"(a), "r"(b));
}
template <> OP void wgmma_ss_terms<80>(float* d, u32 a, u32 b) {
  asm volatile(WGMMA(80, "bf16", D_80, DESCRIPTOR_OF("a", "%40", "0") DESCRIPTOR_OF("b", "%41", "8"), "a, b", "1", "0, 0") : OF_D_80 : "r"(a), "r"(b));
}
template <> OP void wgmma_ss_terms<96>(float* d, u32 a, u32 b) {
  asm volatile(WGMMA(96, "bf16", D_96, DESCRIPTOR_OF("a", "%48", "0") DESCRIPTOR_OF("b", "%49", "8"), "a, b", "1", "0, 0") : OF_D_96 : "r"(a), "r"(b));
}
template <> OP void wgmma_ss_terms<112>(float* d, u32 a, u32 b) {
  asm volatile(WGMMA(112, "bf16", D_112, DESCRIPTOR_OF("a", "%56", "0") DESCRIPTOR_OF("b", "%57", "8"), "a, b", "1", "0, 0") : OF_D_112 : "r"(a), "r"(b));
}
template <> OP void wgmma_ss_terms<128>(float* d, u32 a, u32 b) {
  asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR_OF("a", "%64", "0") DESCRIPTOR_OF("b", "%65", "8"), "a, b", "1", "0, 0") : OF_D_128 : "r"(a), "r"(b));
}

OP void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
OP void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> OP void wgmma_wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }
#else
// Calls put(row, col, tile[row0 + row, col]) for what a product reads of some rows.
template <int ROWS, int WIDTH, typename Put> void read_rows(const PanelTile<ROWS, WIDTH>& tile, int row0, int rows, CallSite at, Put put) {
  for (int first = 0; first < WIDTH; first += 64) {
    const SharedAddress panel = tile.base + first / 64 * tile.panel_bytes;
    host::self->check_shown(panel + row0 * 128, rows * 128, "multiplies", at);
    for (int r = 0; r < rows; ++r) {
      Element row[64];
      std::memcpy(row, panel + (row0 + r) * 128, sizeof row);
      for (int c = 0; c < min_of(WIDTH - first, 64); ++c) put(r, first + c, to_float(row[c ^ (row0 + r) % 8 * 8]));
    }
  }
}
template <int K, int N> void multiply_add(Acc<16, N>& d, const float (&a_f32)[16][K], const float (&b_f32)[K][N]) {
  count_flops(2 * 16 * K * N);
  float sum[16][N] = {};
  add_product(sum, a_f32, b_f32);
  for_lane(l) for (int r = 0; r < d.regs; ++r) d.at(l, r) += sum[d.row(l, r)][d.col(l, r)];
}
// d becomes what compute(d) makes of it when a wait names it, and is NaN until then. It adds to d, or it makes a new d.
template <int N, typename Compute> void start_on_host(Acc<16, N>& d, bool add, CallSite at, Compute compute) {
  host::self->start_product(&d, sizeof d, add, [=](void* sum) { compute(*static_cast<Acc<16, N>*>(sum)); }, at);
}
#endif

#if ON_GPU
// The steps in k of s = a b^T, or of s += a b^T.
template <int N, int ROWS, int WIDTH>
OP void multiply_transposed(Acc<16, N>& s, const PanelTile<ROWS, WIDTH>& a, int row0, const PanelTile<N, WIDTH>& b, bool add) {
  const u32 desc_a = descriptor(a.base + row0 * 128, 16), desc_b = descriptor(b.base, 16);
  pin(s);
  wgmma_fence();                                              // without it the product may overtake what was written to its registers
  #pragma unroll
  for (int i = 0; i < WIDTH / 16; ++i)
    wgmma_ss<N>(s.v, desc_a + (i / 4 * a.panel_bytes + i % 4 * 32) / 16, desc_b + (i / 4 * b.panel_bytes + i % 4 * 32) / 16, add || i > 0);
}
#endif
// s = a b^T is started, or s += a b^T: rows row0 ... row0 + 63 of a for a warpgroup, 16 of them for the calling warp.
template <int N, int ROWS, int WIDTH>
OP void start_product_transposed(Acc<16, N>& s, const PanelTile<ROWS, WIDTH>& a, int row0, const PanelTile<N, WIDTH>& b, bool add = false,
                                 CallSite at = call_site()) {
#if ON_GPU
  multiply_transposed(s, a, row0, b, add);
  wgmma_commit_group();
#else
  const int warp_row = row0 + warp_id() % 4 * 16;
  start_on_host(s, add, at, [=](Acc<16, N>& s) {
    float a_f32[16][WIDTH], b_f32[WIDTH][N];
    read_rows(a, warp_row, 16, at, [&](int row, int col, float x) { a_f32[row][col] = x; });
    read_rows(b, 0, N, at, [&](int row, int col, float x) { b_f32[col][row] = x; });
    if (!add) fill(s, 0.f);
    multiply_add(s, a_f32, b_f32);
  });
#endif
}

// A term for each of N rows of the B operand of a product, as 16 bytes: in bfloat16, which has the exponents of float32, three parts, which have its
// 24 bits, and zeros. Both halves of a step in k read the same bytes, so that parts are those of half the term. Beside the A operand there are ones,
// or, of terms of few bits, parts of a factor: eight rows of 16 bytes, which are read for all rows and both halves.
// compute-sanitizer does not know of bytes that are read twice, and reports what would not have room for both operands whole behind it in shared memory.
template <int N> struct TermTile {
  static constexpr int bytes = 16 * N, bytes_of_factors = 128, bytes_as_operand = 32 * max_of(N, 64);
  SharedAddress base, factors;
  OP SharedAddress at(int row) const { return base + 16 * row; }
};
struct alignas(16) TermParts { u32 x[4]; };
OP float cut_to_bfloat(float x) { return bits_float(float_bits(x) & 0xffff0000u); }
OP TermParts parts_of(float term) {
  const float half = 0.5f * term, high = cut_to_bfloat(half), rest = high == half ? 0.f : half - high; // infinity less infinity would be NaN
  const float middle = cut_to_bfloat(rest);
  return {float_bits(high) >> 16 | float_bits(middle), float_bits(rest - middle) >> 16, 0, 0};
}
template <int N> OP void store_ones(const TermTile<N>& terms) {
  for_lane(l) store_shared(terms.factors + 4 * l, 0x3f803f80u);
}

// s = a b^T + factors terms^T is started: another step in k. It comes last, because each step cuts sums off, and those of large terms are rounded once so.
template <int N, int ROWS, int WIDTH>
OP void start_product_transposed(Acc<16, N>& s, const PanelTile<ROWS, WIDTH>& a, int row0, const PanelTile<N, WIDTH>& b, const TermTile<N>& terms,
                                 CallSite at = call_site()) {
#if ON_GPU
  multiply_transposed(s, a, row0, b, false);
  wgmma_ss_terms<N>(s.v, descriptor(terms.factors, 0), descriptor(terms.base, 0));
  wgmma_commit_group();
#else
  start_product_transposed(s, a, row0, b, false, at);
  start_on_host(s, true, at, [=](Acc<16, N>& s) {
    host::self->check_shown(terms.base, terms.bytes, "multiplies", at);
    host::self->check_shown(terms.factors, terms.bytes_of_factors, "multiplies", at);
    float a_f32[16][16], b_f32[16][N];
    const auto read = [](SharedAddress row, int k) { return unpack<bfloat_t>(load_shared<TermParts>(row).x[k % 8 / 2], k % 2); };
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 16; ++row) a_f32[row][k] = read(terms.factors + row % 8 * 16, k);
      for (int col = 0; col < N; ++col) b_f32[k][col] = read(terms.at(col), k);
    }
    multiply_add(s, a_f32, b_f32);
  });
#endif
}

// d = a b[:, col0 : col0 + N] is started: 64 rows of a from row0 on for a warpgroup, both operands in shared memory.
template <int N, int ROWS, int INNER, int WIDTH>
OP void start_product(Acc<16, N>& d, const PanelTile<ROWS, INNER>& a, int row0, const PanelTile<INNER, WIDTH>& b, int col0,
                      CallSite at = call_site()) {
#if ON_GPU
  const u32 desc_a = descriptor(a.base + row0 * 128, 16), desc_b = descriptor(b.base + col0 / 64 * b.panel_bytes + col0 % 64 * 2, b.panel_bytes);
  pin(d);
  wgmma_fence();                                              // without it the product may overtake what was written to its registers
  #pragma unroll
  for (int i = 0; i < INNER / 16; ++i)
    wgmma_ss_b_mn<N>(d.v, desc_a + (i / 4 * a.panel_bytes + i % 4 * 32) / 16, desc_b + i * 16 * 128 / 16, i > 0);
  wgmma_commit_group();
#else
  const int warp_row = row0 + warp_id() % 4 * 16;
  if (col0 % 64 && col0 % 64 + N > 64) host::self->fail("multiplies columns that begin inside a panel and go on in the next", at);
  start_on_host(d, false, at, [=](Acc<16, N>& d) {
    float a_f32[16][INNER], b_f32[INNER][N];
    read_rows(a, warp_row, 16, at, [&](int row, int col, float x) { a_f32[row][col] = x; });
    read_rows(b, 0, INNER, at, [&](int row, int col, float x) { if (col0 <= col && col < col0 + N) b_f32[row][col - col0] = x; });
    fill(d, 0.f);
    multiply_add(d, a_f32, b_f32);
  });
#endif
}

// d = a[:, col0 : col0 + 64]^T b^T is started: a warp has 16 rows of d, both operands in shared memory.
template <int N, int INNER, int WIDTH>
OP void start_transposed_product(Acc<16, N>& d, const PanelTile<INNER, WIDTH>& a, int col0, const PanelTile<N, INNER>& b, CallSite at = call_site()) {
#if ON_GPU
  const u32 desc_a = descriptor(a.base + col0 / 64 * a.panel_bytes, a.panel_bytes), desc_b = descriptor(b.base, 16);
  pin(d);
  wgmma_fence();                                              // without it the product may overtake what was written to its registers
  #pragma unroll
  for (int i = 0; i < INNER / 16; ++i)
    wgmma_ss_a_mn<N>(d.v, desc_a + i * 16 * 128 / 16, desc_b + (i / 4 * b.panel_bytes + i % 4 * 32) / 16, i > 0);
  wgmma_commit_group();
#else
  const int warp_col = col0 + warp_id() % 4 * 16;
  start_on_host(d, false, at, [=](Acc<16, N>& d) {
    float a_f32[16][INNER], b_f32[INNER][N];
    read_rows(a, 0, INNER, at, [&](int row, int col, float x) { if (warp_col <= col && col < warp_col + 16) a_f32[col - warp_col][row] = x; });
    read_rows(b, 0, N, at, [&](int row, int col, float x) { b_f32[col][row] = x; });
    fill(d, 0.f);
    multiply_add(d, a_f32, b_f32);
  });
#endif
}

// o += p v is started, or o = p v: p in registers.
template <int K, int TILE, int WIDTH>
OP void start_product(Acc<16, WIDTH>& o, const OperandA<16> (&p)[K], const PanelTile<TILE, WIDTH>& v, bool add = true, CallSite at = call_site()) {
  static_assert(TILE == 16 * K, "a column of p for each row of v");
#if ON_GPU
  const u32 b = descriptor(v.base, v.panel_bytes);
  pin(o);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < K; ++i) wgmma_rs<WIDTH>(o.v, p[i].v, b + i * 16 * 128 / 16, add || i > 0);
  wgmma_commit_group();
#else
  start_on_host(o, add, at, [=, &p](Acc<16, WIDTH>& o) {
    if (!add) fill(o, 0.f);
    float a_f32[16][16 * K], b_f32[16 * K][WIDTH];
    for (int i = 0; i < K; ++i)
      for_lane(l) for (int r = 0; r < p[i].regs; ++r) for (int half = 0; half < 2; ++half)
        a_f32[p[i].row(l, r)][16 * i + p[i].k(l, r) + half] = unpack<Element>(p[i].at(l, r), half);
    read_rows(v, 0, 16 * K, at, [&](int row, int col, float x) { b_f32[row][col] = x; });
    multiply_add(o, a_f32, b_f32);
  });
#endif
}
// Waits until at most PENDING products of this warp, the ones started last, are still running. `done` is the result of one that is not.
template <int PENDING, int N> OP void wait_for_products(Acc<16, N>& done, CallSite at = call_site()) {
#if ON_GPU
  wgmma_wait_group<PENDING>();
  pin(done);
#else
  host::self->wait_for_products(PENDING, &done, at);
#endif
}

// wgmma_instructions.cuh -- products of a warpgroup, one PTX instruction each (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"), and
// where their operands lie.
#pragma once
#include "tile/scope.cuh"

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
#define D_48 TEN() TEN(1) "%20, %21, %22, %23"
#define OF_D_48 OF_TEN(d, ), OF_TEN(d, 1), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
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
#define D_224 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) "%110, %111"
#define OF_D_224 OF_TEN(d, ), OF_TEN(d, 1), OF_TEN(d, 2), OF_TEN(d, 3), OF_TEN(d, 4), OF_TEN(d, 5), OF_TEN(d, 6), OF_TEN(d, 7), \
  OF_TEN(d, 8), OF_TEN(d, 9), OF_TEN(d, 10), "+f"(d[110]), "+f"(d[111])
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
// the same as the first with a in registers
template <int N> OP void wgmma_rs_b_k(float* d, const u32* a, u32 b, int add);
// d += a b^T: eight columns, twice, of eight rows of a, eight times, and of N rows of b, in rows of 16 bytes, one behind the other; both are
// bfloat16, whatever elements are
template <int N> OP void wgmma_ss_terms(float* d, u32 a, u32 b);
template <> OP void wgmma_ss<32>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(32, "f16", D_32, DESCRIPTOR("a", "%16") DESCRIPTOR("b", "%17"), "a, b", "%18", "0, 0") : OF_D_32 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(32, "bf16", D_32, DESCRIPTOR("a", "%16") DESCRIPTOR("b", "%17"), "a, b", "%18", "0, 0") : OF_D_32 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss<48>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(48, "f16", D_48, DESCRIPTOR("a", "%24") DESCRIPTOR("b", "%25"), "a, b", "%26", "0, 0") : OF_D_48 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(48, "bf16", D_48, DESCRIPTOR("a", "%24") DESCRIPTOR("b", "%25"), "a, b", "%26", "0, 0") : OF_D_48 : "r"(a), "r"(b), "r"(add));
}
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
template <> OP void wgmma_ss_b_mn<96>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(96, "f16", D_96, DESCRIPTOR("a", "%48") DESCRIPTOR("b", "%49"), "a, b", "%50", "0, 1") : OF_D_96 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(96, "bf16", D_96, DESCRIPTOR("a", "%48") DESCRIPTOR("b", "%49"), "a, b", "%50", "0, 1") : OF_D_96 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_b_mn<128>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(128, "f16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 1") : OF_D_128 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR("a", "%64") DESCRIPTOR("b", "%65"), "a, b", "%66", "0, 1") : OF_D_128 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_a_mn<48>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(48, "f16", D_48, DESCRIPTOR("a", "%24") DESCRIPTOR("b", "%25"), "a, b", "%26", "1, 0") : OF_D_48 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(48, "bf16", D_48, DESCRIPTOR("a", "%24") DESCRIPTOR("b", "%25"), "a, b", "%26", "1, 0") : OF_D_48 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_ss_a_mn<80>(float* d, u32 a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(80, "f16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "1, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(80, "bf16", D_80, DESCRIPTOR("a", "%40") DESCRIPTOR("b", "%41"), "a, b", "%42", "1, 0") : OF_D_80 : "r"(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<32>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(32, "f16", D_32, DESCRIPTOR("b", "%20"), "{%16, %17, %18, %19}, b", "%21", "1") : OF_D_32 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(32, "bf16", D_32, DESCRIPTOR("b", "%20"), "{%16, %17, %18, %19}, b", "%21", "1") : OF_D_32 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<48>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(48, "f16", D_48, DESCRIPTOR("b", "%28"), "{%24, %25, %26, %27}, b", "%29", "1") : OF_D_48 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(48, "bf16", D_48, DESCRIPTOR("b", "%28"), "{%24, %25, %26, %27}, b", "%29", "1") : OF_D_48 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<64>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(64, "f16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "1") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "1") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs_b_k<64>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(64, "f16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "0") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(64, "bf16", D_64, DESCRIPTOR("b", "%36"), "{%32, %33, %34, %35}, b", "%37", "0") : OF_D_64 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<80>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(80, "f16", D_80, DESCRIPTOR("b", "%44"), "{%40, %41, %42, %43}, b", "%45", "1") : OF_D_80 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(80, "bf16", D_80, DESCRIPTOR("b", "%44"), "{%40, %41, %42, %43}, b", "%45", "1") : OF_D_80 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<96>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(96, "f16", D_96, DESCRIPTOR("b", "%52"), "{%48, %49, %50, %51}, b", "%53", "1") : OF_D_96 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(96, "bf16", D_96, DESCRIPTOR("b", "%52"), "{%48, %49, %50, %51}, b", "%53", "1") : OF_D_96 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<112>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(112, "f16", D_112, DESCRIPTOR("b", "%60"), "{%56, %57, %58, %59}, b", "%61", "1") : OF_D_112 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(112, "bf16", D_112, DESCRIPTOR("b", "%60"), "{%56, %57, %58, %59}, b", "%61", "1") : OF_D_112 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<128>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(128, "f16", D_128, DESCRIPTOR("b", "%68"), "{%64, %65, %66, %67}, b", "%69", "1") : OF_D_128 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(128, "bf16", D_128, DESCRIPTOR("b", "%68"), "{%64, %65, %66, %67}, b", "%69", "1") : OF_D_128 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<160>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(160, "f16", D_160, DESCRIPTOR("b", "%84"), "{%80, %81, %82, %83}, b", "%85", "1") : OF_D_160 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(160, "bf16", D_160, DESCRIPTOR("b", "%84"), "{%80, %81, %82, %83}, b", "%85", "1") : OF_D_160 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<192>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(192, "f16", D_192, DESCRIPTOR("b", "%100"), "{%96, %97, %98, %99}, b", "%101", "1") : OF_D_192 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(192, "bf16", D_192, DESCRIPTOR("b", "%100"), "{%96, %97, %98, %99}, b", "%101", "1") : OF_D_192 : OF_A(a), "r"(b), "r"(add));
}
template <> OP void wgmma_rs<224>(float* d, const u32* a, u32 b, int add) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile(WGMMA(224, "f16", D_224, DESCRIPTOR("b", "%116"), "{%112, %113, %114, %115}, b", "%117", "1") : OF_D_224 : OF_A(a), "r"(b), "r"(add));
  else
    asm volatile(WGMMA(224, "bf16", D_224, DESCRIPTOR("b", "%116"), "{%112, %113, %114, %115}, b", "%117", "1") : OF_D_224 : OF_A(a), "r"(b), "r"(add));
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
#endif

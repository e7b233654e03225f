// fp16_parts.cuh -- float32 operands in products of float16. Each element is one or two numbers, x * 2^e = high + low, where 2^e lets the largest element
// of its head nearly fill float16. Two have 22 bits, and of a product
//   a b = high_a high_b + high_a low_b + low_a high_b + low_a low_b
// the last one is below 2^-22 of it and left out: three products of float16 are as accurate as one of float32, and tensor cores take twice as many
// steps of float16 as of tf32. (Ootomo and Yokota, 2022, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance".) What is not in the range of float16 beside the largest element, 2^-35 of it, is lost.
// kernels_cu/fp16_parts.cu makes them of q, k and v; P, which is between 0 and LARGE, is made of registers.
#pragma once
#include "tile/part_factors.cuh"
#include "tile/wgmma.cuh"

// ROWS x WIDTH elements as TMA brings them: high parts, then low parts, in panels of 64 columns.
template <int ROWS, int WIDTH> struct PartsTile {
  typedef PanelTile<ROWS, WIDTH> Part;
  static constexpr int rows = ROWS, panels = 2 * Part::panels, panel_bytes = Part::panel_bytes, bytes = 2 * Part::bytes;
  SharedAddress base;
  OP Part high() const { return {base}; }
  OP Part low() const { return {base + Part::bytes}; }
};

template <int ROWS, int WIDTH> using OperandTile = Choose<FP16_PARTS == 2, PartsTile<ROWS, WIDTH>, PanelTile<ROWS, WIDTH>>;

// Registers of an accumulator as A operands: those of high parts, then those of low parts.
template <int K> OP void to_operands(OperandA<16> (&p)[K], const Acc<16, 8 * K>& s) {
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) {
    to_operand(p[i], s, 16 * i);
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < 4; ++r) {
        const u32 high = p[i].at(l, r);
        p[K / 2 + i].at(l, r) = pack<Element>(s.at(l, 8 * i + 2 * r) - unpack<Element>(high, 0), s.at(l, 8 * i + 2 * r + 1) - unpack<Element>(high, 1));
      }
    }
  }
}
template <int K> OP void to_operands(OperandA<16> (&p)[K], const Acc<16, 8 * K>& s, const OperandA<16> (&)[K / 2]) { to_operands(p, s); } // nothing is dropped

// Tensor cores cut their sums off towards zero. Of half precision that is below the rounding of operands, but a float32 sum over thousands of keys
// would be dragged towards zero: they add up a key tile, and additions that round join these.
constexpr bool OWN_SUMS = FP16_PARTS == 2;
template <int N> OP void promote(Acc<16, N>& o, const Acc<16, N>& product) {
  if constexpr (OWN_SUMS) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < o.regs; ++r) o.at(l, r) += product.at(l, r);
    }
  }
}
template <int N> OP void clear(Acc<16, N>& o) {
  if constexpr (OWN_SUMS) fill(o, 0.f);
}

// s = a b^T is started, or s += a b^T. The largest products come last, since each step cuts sums off.
template <int N, int ROWS, int WIDTH>
OP void start_product_transposed(Acc<16, N>& s, const PartsTile<ROWS, WIDTH>& a, int row0, const PartsTile<N, WIDTH>& b, bool add = false,
                                 CallSite at = call_site()) {
#if ON_GPU
  multiply_transposed(s, a.low(), row0, b.high(), add);
  multiply_transposed(s, a.high(), row0, b.low(), true);
  multiply_transposed(s, a.high(), row0, b.high(), true);
  wgmma_commit_group();
#else
  start_product_transposed(s, a.low(), row0, b.high(), add, at);
  start_product_transposed(s, a.high(), row0, b.low(), true, at);
  start_product_transposed(s, a.high(), row0, b.high(), true, at);
#endif
}

// 16 rows of a tile as A operands: those of high parts, then those of low parts.
template <int K, int ROWS, int WIDTH> OP void load_operands(OperandA<16> (&a)[K], const PartsTile<ROWS, WIDTH>& tile, int row0) {
  static_assert(K == 2 * WIDTH / 16, "two operands for 16 columns");
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) {
    load(a[i], tile.high().panel(i / 4), row0, i % 4 * 16);
    load(a[K / 2 + i], tile.low().panel(i / 4), row0, i % 4 * 16);
  }
}
// s = a b^T is started, a in registers.
template <int N, int K, int WIDTH>
OP void start_product_transposed(Acc<16, N>& s, const OperandA<16> (&a)[K], const PartsTile<N, WIDTH>& b, CallSite at = call_site()) {
  static_assert(K == 2 * WIDTH / 16, "two operands for 16 columns");
#if ON_GPU
  const u32 high = descriptor(b.high().base, 16), low = descriptor(b.low().base, 16);
  const auto step = [&](int i) { return (i / 4 * b.panel_bytes + i % 4 * 32) / 16; };
  pin(s);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs_b_k<N>(s.v, a[K / 2 + i].v, high + step(i), i > 0);
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs_b_k<N>(s.v, a[i].v, low + step(i), true);
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs_b_k<N>(s.v, a[i].v, high + step(i), true);
  wgmma_commit_group();
#else
  start_on_host(s, false, at, [=, &a](Acc<16, N>& s) {
    fill(s, 0.f);
    const auto multiply_parts = [&](int first, const PanelTile<N, WIDTH>& b) {
      float a_f32[16][WIDTH], b_f32[WIDTH][N];
      for (int i = 0; i < K / 2; ++i)
        for_lane(l) for (int r = 0; r < 4; ++r) for (int half = 0; half < 2; ++half)
          a_f32[a[i].row(l, r)][16 * i + a[i].k(l, r) + half] = unpack<Element>(a[first + i].at(l, r), half);
      read_rows(b, 0, N, at, [&](int row, int col, float x) { b_f32[col][row] = x; });
      multiply_add(s, a_f32, b_f32);
    };
    multiply_parts(K / 2, b.high()), multiply_parts(0, b.low()), multiply_parts(0, b.high());
  });
#endif
}

// d = a b[:, col0 : col0 + N] is started.
template <int N, int ROWS, int INNER, int WIDTH>
OP void start_product(Acc<16, N>& d, const PartsTile<ROWS, INNER>& a, int row0, const PartsTile<INNER, WIDTH>& b, int col0, CallSite at = call_site()) {
#if ON_GPU
  multiply(d, a.low(), row0, b.high(), col0, false);
  multiply(d, a.high(), row0, b.low(), col0, true);
  multiply(d, a.high(), row0, b.high(), col0, true);
  wgmma_commit_group();
#else
  start_product(d, a.low(), row0, b.high(), col0, false, at);
  start_product(d, a.high(), row0, b.low(), col0, true, at);
  start_product(d, a.high(), row0, b.high(), col0, true, at);
#endif
}

// o += p v is started, or o = p v.
template <int K, int TILE, int WIDTH>
OP void start_product(Acc<16, WIDTH>& o, const OperandA<16> (&p)[K], const PartsTile<TILE, WIDTH>& v, bool add = true, CallSite at = call_site()) {
  static_assert(TILE == 8 * K, "two columns of p for each row of v");
#if ON_GPU
  const u32 high = descriptor(v.high().base, v.panel_bytes), low = descriptor(v.low().base, v.panel_bytes);
  pin(o);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs<WIDTH>(o.v, p[K / 2 + i].v, high + i * 16 * 128 / 16, add || i > 0);
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs<WIDTH>(o.v, p[i].v, low + i * 16 * 128 / 16, true);
  #pragma unroll
  for (int i = 0; i < K / 2; ++i) wgmma_rs<WIDTH>(o.v, p[i].v, high + i * 16 * 128 / 16, true);
  wgmma_commit_group();
#else
  start_on_host(o, add, at, [=, &p](Acc<16, WIDTH>& o) {
    if (!add) fill(o, 0.f);
    const auto multiply_parts = [&](int first, const PanelTile<TILE, WIDTH>& b) {
      float a_f32[16][TILE], b_f32[TILE][WIDTH];
      for (int i = 0; i < K / 2; ++i)
        for_lane(l) for (int r = 0; r < 4; ++r) for (int half = 0; half < 2; ++half)
          a_f32[p[i].row(l, r)][16 * i + p[i].k(l, r) + half] = unpack<Element>(p[first + i].at(l, r), half);
      read_rows(b, 0, TILE, at, [&](int row, int col, float x) { b_f32[row][col] = x; });
      multiply_add(o, a_f32, b_f32);
    };
    multiply_parts(K / 2, v.high()), multiply_parts(0, v.low()), multiply_parts(0, v.high());
  });
#endif
}

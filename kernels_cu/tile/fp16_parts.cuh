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
// With DROPOUT what is left of them, as in dropout.cuh.
template <int K> OP void to_operands(OperandA<16> (&p)[K], const Acc<16, 8 * K>& s, const OperandA<16> (&kept)[K / 2]) {
  to_operands(p, s);
  if constexpr (DROPOUT) {
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < K; ++i)
        #pragma unroll
        for (int r = 0; r < 4; ++r) p[i].at(l, r) &= kept[i % (K / 2)].at(l, r);
    }
  }
}

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

// Rows of a warp, of one part: K operands in registers, and the columns behind those in memory, where they begin at row0 of a warpgroup.
template <int K, int ROWS, int WIDTH> struct KeptRows {
  OperandA<16> kept[max_of(K, 1)];
  PanelTile<ROWS, WIDTH> tile;
  OP KeptRows(const PanelTile<ROWS, WIDTH>& tile, int row) : tile(tile) {
    #pragma unroll
    for (int i = 0; i < K; ++i) load(kept[i], tile.panel(i / 4), row, i % 4 * 16);
  }
};
#if ON_GPU
// The steps in k of s = a b^T, or of s += a b^T.
template <int N, int K, int ROWS, int WIDTH>
OP void multiply_transposed(Acc<16, N>& s, const KeptRows<K, ROWS, WIDTH>& a, const PanelTile<N, WIDTH>& b, bool add) {
  const u32 desc_a = descriptor(a.tile.base, 16), desc_b = descriptor(b.base, 16);
  pin(s);
  wgmma_fence();                                              // without it the product may overtake what was written to its registers
  #pragma unroll
  for (int i = 0; i < K; ++i) wgmma_rs_b_k<N>(s.v, a.kept[i].v, desc_b + (i / 4 * b.panel_bytes + i % 4 * 32) / 16, add || i > 0);
  #pragma unroll
  for (int i = K; i < WIDTH / 16; ++i)
    wgmma_ss<N>(s.v, desc_a + (i / 4 * a.tile.panel_bytes + i % 4 * 32) / 16, desc_b + (i / 4 * b.panel_bytes + i % 4 * 32) / 16, add || i > 0);
}
#else
template <int N, int K, int ROWS, int WIDTH>
void start_product_transposed(Acc<16, N>& s, const KeptRows<K, ROWS, WIDTH>& a, const PanelTile<N, WIDTH>& b, bool add, CallSite at) {
  start_on_host(s, add, at, [=, &a](Acc<16, N>& s) {
    float a_f32[16][WIDTH], b_f32[WIDTH][N];
    read_rows(a.tile, warp_id() % 4 * 16, 16, at, [&](int row, int col, float x) { a_f32[row][col] = x; });
    for (int i = 0; i < K; ++i)
      for_lane(l) for (int r = 0; r < 4; ++r) for (int half = 0; half < 2; ++half)
        a_f32[a.kept[i].row(l, r)][16 * i + a.kept[i].k(l, r) + half] = unpack<Element>(a.kept[i].at(l, r), half);
    read_rows(b, 0, N, at, [&](int row, int col, float x) { b_f32[col][row] = x; });
    if (!add) fill(s, 0.f);
    multiply_add(s, a_f32, b_f32);
  });
}
#endif
// Rows of a warp in so many parts, of which some columns of high parts are in registers, and of low parts.
template <int PARTS, int HIGH, int LOW> struct OwnRows {
  KeptRows<HIGH, TILE_KV, DIM> high;
  KeptRows<LOW, TILE_KV, DIM> low;
  OP OwnRows(const PartsTile<TILE_KV, DIM>& tile, int row) : high(tile.high(), row), low(tile.low(), row) {}
  // s = own b^T is started.
  template <int N> OP void start(Acc<16, N>& s, const PartsTile<N, DIM>& b, CallSite at = call_site()) const {
#if ON_GPU
    multiply_transposed(s, low, b.high(), false);
    multiply_transposed(s, high, b.low(), true);
    multiply_transposed(s, high, b.high(), true);
    wgmma_commit_group();
#else
    start_product_transposed(s, low, b.high(), false, at);
    start_product_transposed(s, high, b.low(), true, at);
    start_product_transposed(s, high, b.high(), true, at);
#endif
  }
};
template <int HIGH, int LOW> struct OwnRows<1, HIGH, LOW> {
  KeptRows<HIGH, TILE_KV, DIM> high;
  OP OwnRows(const PanelTile<TILE_KV, DIM>& tile, int row) : high(tile, row) {}
  template <int N> OP void start(Acc<16, N>& s, const PanelTile<N, DIM>& b, CallSite at = call_site()) const {
#if ON_GPU
    multiply_transposed(s, high, b, false);
    wgmma_commit_group();
#else
    start_product_transposed(s, high, b, false, at);
#endif
  }
};

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

// wgmma.cuh -- products of a warpgroup: four warps of 16 rows each. The B operand lies in shared memory, the A operand there too or
// in registers. A product is started, runs beneath what follows, and is waited for.
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".) Accumulators and A operands are laid out as those of mma.sync.
#pragma once
#include "tile/panel.cuh"
#include "tile/wgmma_instructions.cuh"

#if !ON_GPU
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

#if ON_GPU
// The steps in k of d = a b[:, col0 : col0 + N], or of d += that.
template <int N, int ROWS, int INNER, int WIDTH>
OP void multiply(Acc<16, N>& d, const PanelTile<ROWS, INNER>& a, int row0, const PanelTile<INNER, WIDTH>& b, int col0, bool add) {
  const u32 desc_a = descriptor(a.base + row0 * 128, 16), desc_b = descriptor(b.base + col0 / 64 * b.panel_bytes + col0 % 64 * 2, b.panel_bytes);
  pin(d);
  wgmma_fence();                                              // without it the product may overtake what was written to its registers
  #pragma unroll
  for (int i = 0; i < INNER / 16; ++i)
    wgmma_ss_b_mn<N>(d.v, desc_a + (i / 4 * a.panel_bytes + i % 4 * 32) / 16, desc_b + i * 16 * 128 / 16, add || i > 0);
}
#endif
// d = a b[:, col0 : col0 + N] is started, or d += that: 64 rows of a from row0 on for a warpgroup, both operands in shared memory.
template <int N, int ROWS, int INNER, int WIDTH>
OP void start_product(Acc<16, N>& d, const PanelTile<ROWS, INNER>& a, int row0, const PanelTile<INNER, WIDTH>& b, int col0, bool add = false,
                      CallSite at = call_site()) {
#if ON_GPU
  multiply(d, a, row0, b, col0, add);
  wgmma_commit_group();
#else
  const int warp_row = row0 + warp_id() % 4 * 16;
  if (col0 % 64 && col0 % 64 + N > 64) host::self->fail("multiplies columns that begin inside a panel and go on in the next", at);
  start_on_host(d, add, at, [=](Acc<16, N>& d) {
    float a_f32[16][INNER], b_f32[INNER][N];
    read_rows(a, warp_row, 16, at, [&](int row, int col, float x) { a_f32[row][col] = x; });
    read_rows(b, 0, INNER, at, [&](int row, int col, float x) { if (col0 <= col && col < col0 + N) b_f32[row][col - col0] = x; });
    if (!add) fill(d, 0.f);
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

// panel.cuh -- tiles in shared memory as TMA writes them and wgmma reads them.
#pragma once
#include "tile/copy.cuh"

// ROWS x WIDTH elements of 16 bits in panels of 64 columns, or of 32 bits in panels of 32, one behind the other. A row of a panel is 128 bytes, its
// eight chunks xor-ed with the row: the hardware's 128-byte swizzle, for which a panel starts at a multiple of 1024 bytes.
template <int ROWS, int WIDTH, typename T = u16> struct PanelTile {
  static constexpr int rows = ROWS;
  static constexpr int panel_cols = 128 / int(sizeof(T));
  static constexpr int panels = ceil_div(WIDTH, panel_cols);
  static constexpr int panel_bytes = ROWS * 128;
  static constexpr int bytes = panels * panel_bytes;
  SharedAddress base;
  OP SharedTile<ROWS, 64> panel(int i) const { return {base + i * panel_bytes}; }
};

#if ON_GPU
OP void stmatrix_x4_trans(SharedAddress row, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#endif

// tile[row0 : row0 + 16] = acc, rounded to the element type, in memory that belongs to the warp; row0 is a multiple of 8
template <int ROWS, int WIDTH> OP void store(const PanelTile<ROWS, WIDTH>& tile, const Acc<16, WIDTH>& acc, int row0) {
#if ON_GPU
  const int lane = not_ahead(lane_id());                      // kept, the addresses would take registers
  #pragma unroll
  for (int r = 0; r < acc.regs; r += 8) {                     // four blocks of 8 x 8: the upper rows, the lower ones, and the same of the next columns
    u32 pairs[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack<Element>(acc.v[r + 2 * i], acc.v[r + 2 * i + 1]);
    stmatrix_x4(tile.panel(acc.reg_col(r) / 64).chunk_at(row0, lane % 16, acc.reg_col(r) % 64 / 8, lane / 16), pairs);
  }
#else
  for_lane(l) for (int r = 0; r < acc.regs; r += 2)
    store_shared(tile.panel(acc.reg_col(r) / 64).at(row0 + acc.row(l, r), acc.reg_col(r) % 64, acc.col(l, 0)), pack<Element>(acc.at(l, r), acc.at(l, r + 1)));
#endif
}

// tile[:, col0 : col0 + 16] = the transpose of 16 rows that are at hand as an A operand, in memory that belongs to the warp
template <int ROWS, int WIDTH> OP void store_transposed(const PanelTile<ROWS, WIDTH>& tile, const OperandA<16> (&a)[ROWS / 16], int col0) {
  const SharedTile<ROWS, 64> panel = tile.panel(col0 / 64);
#if ON_GPU
  const int lane = not_ahead(lane_id());                      // kept, the addresses would take registers
#endif
  #pragma unroll
  for (int i = 0; i < ROWS / 16; ++i) {
#if ON_GPU
    stmatrix_x4_trans(panel.chunk_at(16 * i, lane % 8 + lane / 16 * 8, col0 % 64 / 8, lane / 8 % 2), a[i].v);
#else
    for_lane(l) for (int r = 0; r < 4; ++r) for (int half = 0; half < 2; ++half)
      store_shared(panel.at(16 * i + a[i].k(l, r) + half, col0 % 64 + a[i].row(l, r)), u16(a[i].at(l, r) >> 16 * half));
#endif
  }
}

// Calls use(row, sum over columns of a[row] * b[row]) for each row, a lane for each, by one of PARTS warps, whose lanes then meet.
template <int PARTS, int ROWS, int WIDTH, typename Use> OP void for_row_dots(const PanelTile<ROWS, WIDTH>& a, const PanelTile<ROWS, WIDTH>& b, int part, Use use) {
  #pragma unroll 1
  for (int row0 = part * 32; row0 < ROWS; row0 += 32 * PARTS) {
    for_lane(l) {
      const int lane = WIDTH > 64 ? not_ahead(l) : l;         // or addresses of all chunks take registers of the caller's loops
      float dot = 0.f;
      #pragma unroll 1
      for (int panel = 0; panel < a.panels; ++panel) {
        #pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
          const auto x = load_shared<Vector<16>>(a.panel(panel).chunk_at(row0, lane, chunk, 0));
          const auto y = load_shared<Vector<16>>(b.panel(panel).chunk_at(row0, lane, chunk, 0));
          #pragma unroll
          for (int i = 0; i < 8; ++i) dot = fmaf(element_of(x, i), element_of(y, i), dot);
        }
      }
      use(row0 + l, dot);
    }
  }
  sync_warp();
}

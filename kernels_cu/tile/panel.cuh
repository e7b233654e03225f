// panel.cuh -- tiles in shared memory as the copy engine (TMA) writes them and wgmma reads them.
#pragma once
#include "tile/shared.cuh"

// ROWS x WIDTH 16-bit elements in panels of 64 columns, one behind the other. A row of a panel is 128 bytes, its eight chunks xor-ed with
// the row: the hardware's 128-byte swizzle, for which a panel starts at a multiple of 1024 bytes.
template <int ROWS, int WIDTH> struct PanelTile {
  static constexpr int rows = ROWS;
  static constexpr int panels = ceil_div(WIDTH, 64);
  static constexpr int panel_bytes = ROWS * 128;
  static constexpr int bytes = panels * panel_bytes;
  SharedAddress base;
  OP SharedTile<ROWS, 64> panel(int i) const { return {base + i * panel_bytes}; }
};

// tile[row0 : row0 + 16] = acc, rounded to the element type, in memory that belongs to the warp
template <int ROWS, int WIDTH> OP void store(const PanelTile<ROWS, WIDTH>& tile, const Acc<16, WIDTH>& acc, int row0) {
  for_lane(l) {
    const int lane = not_ahead(l);
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 2) {
      const SharedTile<ROWS, 64> panel = tile.panel(acc.reg_col(r) / 64);
      store_shared(panel.at(row0 + acc.row(lane, r), acc.reg_col(r) % 64, acc.col(lane, 0)), pack<Element>(acc.at(l, r), acc.at(l, r + 1)));
    }
  }
}

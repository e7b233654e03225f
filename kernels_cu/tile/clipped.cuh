// clipped.cuh -- the last tile of a sequence that ends within it (VARLEN). TMA brings what lies behind it as well, such as the next sequence, and
// zeros only beyond the array. Of keys that does not matter, since their scores are selected away; but a probability of 0 times a value that is
// no number is none.
#pragma once
#include "tile/copy.cuh"
#include "tile/pipeline.cuh"

// Where the bytes of such a tile arrive, one tile at a time: the barrier of its stage shall open when there are zeros, too.
struct Clipping {
  Mbarrier arrived;
  u32 count = 0;                                              // of tiles before
  OP Clipping(SharedAddress barrier) : arrived{barrier} {}
};
OP void init_clipping(const Clipping& clipping) { init_mbarrier(clipping.arrived, TILE_LOADERS); }

// tile[rows :] = 0, of all parts, by the warps that bring the tile
template <typename Tile> OP void clear_rows(const Tile& tile, int rows, int warp) {
  for_lane(l) {
    #pragma unroll 1
    for (int chunk = rows * 8 + 32 * warp + l; chunk < Tile::rows * 8; chunk += 32 * TILE_LOADERS) {
      #pragma unroll
      for (int i = 0; i < tile.panels; ++i) store_shared(tile.base + i * tile.panel_bytes + chunk * 16, Vector<16>{});
    }
  }
}

// The stage at hand = what the `load` of all warps of the tile brings, of whose rows the first `rows` count and the others become zeros; goes on
// to the next one.
template <typename T, int DEPTH, Lanes LANES, typename Load>
OP void clip(Pipeline<T, DEPTH, LANES>& pipeline, Clipping& clipping, int rows, int warp, const Load& load, CallSite at) {
  Pipeline<T, 1, LANES> alone(pipeline.tile().base, clipping.arrived.address);   // in the place of the stage
  alone.count = clipping.count++;
  const Pipeline<T, 1, LANES> before = alone;
  load(alone);
  consumer_wait(before, at);                                  // without it TMA writes over the zeros
  clear_rows(pipeline.tile(), max_of(rows, 0), warp);
  fence_proxy_async();                                        // without it products read what was there before the zeros
  arrive_at<LANES>(pipeline.full(), at);                      // without it the consumers wait for ever
  pipeline.advance();
}
template <typename T, int DEPTH, Lanes LANES>
OP void load_clipped(Pipeline<T, DEPTH, LANES>& pipeline, Clipping& clipping, const TensorMap& map, const int (&batch)[BATCH_AXES], int head, int row,
                     int rows, CallSite at = call_site()) {
  if (rows >= T::rows) return load_async(pipeline, map, batch, head, row, at);
  clip(pipeline, clipping, rows, 0, [&](Pipeline<T, 1, LANES>& alone) { load_async(alone, map, batch, head, row, at); }, at);
}

// The same of the queries of a warpgroup, by its four warps, each with 16 rows: tile[rows :] = 0, if there are such rows. All four have done so when it is
// the warpgroup's turn to multiply (ping-pong).
template <typename QueryTile> OP void clear_queries(const QueryTile& tile, int rows, int warp) {
  if (rows >= tile.rows) return;
  for_lane(l) {
    #pragma unroll 1
    for (int chunk = max_of(rows, 16 * warp) * 8 + l; chunk < 16 * (warp + 1) * 8; chunk += 32) {
      #pragma unroll
      for (int i = 0; i < tile.panels; ++i) store_shared(tile.base + i * tile.panel_bytes + chunk * 16, Vector<16>{});
    }
  }
  fence_proxy_async();                                        // without it products read what was there before the zeros
}

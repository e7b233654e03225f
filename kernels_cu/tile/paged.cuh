// paged.cuh -- keys and values in pages by TMA (PAGED). A tile is brought in pieces, each of which lies within one page: a piece has so many rows
// that they divide a page and a tile. A lane finds the page of a piece and has its boxes brought, so that all entries of a tile are read at once:
// before a stage is waited for, and once for keys and their values.
#pragma once
#include "tile/clipped.cuh"
#include "tile/work.cuh"

// Where the pieces of a tile are, one for each lane.
struct PagePlaces {
  Regs<int, 1> page, row;
};
// How many hold some of so many rows of a tile.
OP int pieces_of(const HopperVarlenParams& p, int rows, int most) {
  return int(divide(max_of(min_of(rows, most), 0) + p.piece_divmod.divisor - 1, p.piece_divmod));
}
// Those of the tile of a sequence from `row` on; of pieces beyond its end no entry is read.
template <typename Params, typename Coord> OP void find_pages(PagePlaces& places, const Params& p, const Coord& of, int row) {
  if constexpr (PAGED) {
    static_assert(TILE_KV / 8 <= 32, "each lane has one piece, of 8 rows at least");
    const SequenceParams& s = p.sequences;
    const int pieces = pieces_of(p, of.kv.len() - row, TILE_KV);
    for_lane(l) {
      const int key = row + l * int(p.piece_divmod.divisor), number = int(divide(key, s.page_divmod));
      places.row.at(l, 0) = key - number * int(s.page_divmod.divisor);
      if (l < pieces) places.page.at(l, 0) = read_length(s, s.pages, PAGES, i64(of.batch_number) * s.pages_of_sequence + number, s.rows_of_cache - 1);
    }
  }
}

// The stage at hand = keys or values there; goes on to the next one. Pieces of which no row exists are not read, and leave there what there was.
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages(Pipeline<T, DEPTH, LANES>& pipeline, const HopperVarlenParams& p, const TensorMap& map, const PagePlaces& places, int head, int rows,
                   CallSite at = call_site()) {
  const int pieces = pieces_of(p, rows, T::rows), rows_of_piece = int(p.piece_divmod.divisor);
  arrive_expect_tx(pipeline.full(), pieces * rows_of_piece * T::panels * 128, at);
  start_pieces(pipeline, pieces, rows_of_piece, map, places.page, head, places.row, at);
  pipeline.advance();
}
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages_clipped(Pipeline<T, DEPTH, LANES>& pipeline, Clipping& clipping, const HopperVarlenParams& p, const TensorMap& map, const PagePlaces& places,
                           int head, int rows, CallSite at = call_site()) {
  if (rows >= T::rows) return load_pages(pipeline, p, map, places, head, rows, at);
  clip(pipeline, clipping, rows, [&](Pipeline<T, 1, LANES>& alone) { load_pages(alone, p, map, places, head, rows, at); }, at);
}

// Keys, or values, of a sequence wherever they are. Of values, rows beyond its end become zeros.
template <typename Keys, typename Params, typename Coord> OP void load_keys(Keys& keys, const Params& p, const Coord& of, const PagePlaces& places, int row) {
  if constexpr (PAGED) load_pages(keys, p, p.k_map, places, of.head, of.kv.len() - row);
  else load_async(keys, p.k_map, of.batch, of.head, of.kv.first() + row);
}
template <typename Values, typename Params, typename Coord>
OP void load_values(Values& values, Clipping& clipping, const Params& p, const Coord& of, const PagePlaces& places, int row) {
  if constexpr (PAGED) load_pages_clipped(values, clipping, p, p.v_map, places, of.head, of.kv.len() - row);
  else load_clipped(values, clipping, p.v_map, of.batch, of.head, of.kv.first() + row, of.kv.len() - row);
}

// paged.cuh -- keys and values in pages by TMA (PAGED). A tile is brought in pieces, each of which lies within one page: a piece has so many rows
// that they divide a page and a tile. Each warp that loads brings some that follow each other. Lanes find the pages of as many pieces as there are
// lanes, those of several tiles at once, before a stage is waited for, and once for keys and their values.
#pragma once
#include "tile/clipped.cuh"
#include "tile/copied_pages.cuh"
#include "tile/work.cuh"

// The pages of the pieces of some tiles that follow each other, one for each lane.
struct PiecePlaces {
  Regs<int, 1> page;
  int lane;                                                   // of the first piece of the tile at hand
};
using PagePlaces = Choose<COPIED_PAGES, RowPlaces, PiecePlaces>;
static_assert(!PAGED || !FROM_LAST, "pages are found ahead, those of the tile behind the one at hand");
// How many pieces hold some of so many rows.
OP int pieces_of(const HopperVarlenParams& p, int rows) { return int(divide(max_of(rows, 0) + p.piece_divmod.divisor - 1, p.piece_divmod)); }
// Goes on to the tile of a sequence from key `row` on, which is the next one but where a query tile begins. Entries are read for as many tiles as
// lanes have pieces of: a pass of the producer has no time to wait for memory. Of pieces beyond the sequence's end none is read.
template <typename Params, typename Coord> OP void find_pages(PiecePlaces& places, const Params& p, const Coord& of, int row, int, bool begins) {
  if constexpr (PAGED) {
    static_assert(TILE_KV / 8 <= 32, "each lane has one piece, of 8 rows at least");
    const SequenceParams& s = p.sequences;
    places.lane += p.pieces_of_tile;
    if (!begins && places.lane + p.pieces_of_tile <= 32) return;
    places.lane = 0;
    const int pieces = pieces_of(p, of.kv.len() - row);
    for_lane(l) {
      const u32 number = divide(row + l * p.piece_divmod.divisor, s.page_divmod);
      if (l < pieces) places.page.at(l, 0) = read_length(s, s.pages, PAGES, i64(of.batch_number) * s.pages_of_sequence + number, s.rows_of_cache - 1);
    }
  }
}

// The stage at hand = the tile of keys or values there, from key `row` on, of which so many exist, by all warps that load; goes on to the next one.
// Pieces of which no row exists are not read, and leave there what there was.
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages(Pipeline<T, DEPTH, LANES>& pipeline, const HopperVarlenParams& p, const TensorMap& map, const PiecePlaces& places, int head, int row, int rows,
                   int warp, CallSite at = call_site()) {
  const FastDivmod& page = p.sequences.page_divmod;
  const int piece = int(p.piece_divmod.divisor), brought = rows < T::rows ? pieces_of(p, rows) * piece : T::rows;
  const int share = ceil_div(p.pieces_of_tile, PRODUCER_WARPS), begin = warp * share * piece, end = min_of(begin + share * piece, brought);
  arrive_expect_tx(pipeline.full(), max_of(end - begin, 0) * T::panels * 128, at);
  int in_page = row + begin - int(divide(row + begin, page) * page.divisor), lane = places.lane + warp * share;
  int next = value_of_lane(places.page, lane);
  #pragma unroll 1
  for (int to = begin; to < end; to += piece) {
    const int element = next;
    next = value_of_lane(places.page, ++lane);                // ahead: a copy does not wait for it
    start_piece(pipeline, to, piece, map, element, head, in_page, at);
    in_page = in_page + piece < int(page.divisor) ? in_page + piece : 0;
  }
  pipeline.advance();
}
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages_clipped(Pipeline<T, DEPTH, LANES>& pipeline, Clipping& clipping, const HopperVarlenParams& p, const TensorMap& map, const PiecePlaces& places,
                           int head, int row, int rows, int warp, CallSite at = call_site()) {
  if (rows >= T::rows) return load_pages(pipeline, p, map, places, head, row, rows, warp, at);
  clip(pipeline, clipping, rows, warp, [&](Pipeline<T, 1, LANES>& alone) { load_pages(alone, p, map, places, head, row, rows, warp, at); }, at);
}

// Keys, or values, of a sequence wherever they are. Of values, rows beyond its end become zeros.
template <typename Keys, typename Params, typename Coord> OP void load_keys(Keys& keys, const Params& p, const Coord& of, const PagePlaces& places, int row, int warp) {
  if constexpr (COPIED_PAGES) copy_pages(keys, p, p.k, p.sequences.k_page_stride, places, of.head, row, of.kv.len() - row, warp);
  else if constexpr (PAGED) load_pages(keys, p, p.k_map, places, of.head, row, of.kv.len() - row, warp);
  else load_async(keys, p.k_map, of.batch, of.head, of.kv.first() + row);
}
template <typename Values, typename Params, typename Coord>
OP void load_values(Values& values, Clipping& clipping, const Params& p, const Coord& of, const PagePlaces& places, int row, int warp) {
  if constexpr (COPIED_PAGES) copy_pages(values, p, p.v, p.sequences.v_page_stride, places, of.head, row, of.kv.len() - row, warp);
  else if constexpr (PAGED) load_pages_clipped(values, clipping, p, p.v_map, places, of.head, row, of.kv.len() - row, warp);
  else load_clipped(values, clipping, p.v_map, of.batch, of.head, of.kv.first() + row, of.kv.len() - row);
}

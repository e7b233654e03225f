// paged.cuh -- keys and values in pages by TMA (PAGED). A tile is brought in pieces, each of which lies within one page: a piece has so many rows
// that they divide a page and a tile. Each warp that loads brings some of keys or of values, which follow each other. Lanes find the pages of as
// many pieces as there are lanes, those of several tiles at once, before a stage is waited for.
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
static_assert(PAGED ? PRODUCER_WARPS % 2 == 0 : PRODUCER_WARPS == 1, "of several, half bring values");
constexpr int PIECE_ROWS = PAGED && PIECE > 0 ? PIECE : TILE_KV, PIECES = TILE_KV / PIECE_ROWS;
// How many pieces hold some of so many rows.
OP int pieces_of(int rows) { return ceil_div(max_of(rows, 0), PIECE_ROWS); }
// Goes on to the tile of a sequence from key `row` on, which is the next one but where a query tile begins. Entries are read for as many tiles as
// lanes have pieces of: a pass of the producer has no time to wait for memory. Of pieces beyond the sequence's end none is read.
template <typename Params, typename Coord> OP void find_pages(PiecePlaces& places, const Params& p, const Coord& of, int row, int, bool begins) {
  if constexpr (PAGED) {
    static_assert(PIECES <= 32 && TILE_KV % PIECE_ROWS == 0, "each lane has one piece");
    const SequenceParams& s = p.sequences;
    places.lane += PIECES;
    if (!begins && places.lane + PIECES <= 32) return;
    places.lane = 0;
    const int pieces = pieces_of(of.kv.len() - row);
    for_lane(l) {
      const u32 number = divide(row + l * PIECE_ROWS, s.page_divmod);
      if (l < pieces) places.page.at(l, 0) = read_length(s, s.pages, PAGES, i64(of.batch_number) * s.pages_of_sequence + number, s.rows_of_cache - 1);
    }
  }
}

// The stage at hand = the tile of keys or values there, from key `row` on, of which so many exist, by all warps that bring it; goes on to the next one.
// Pieces of which no row exists are not read, and leave there what there was.
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages(Pipeline<T, DEPTH, LANES>& pipeline, const HopperVarlenParams& p, const TensorMap& map, const PiecePlaces& places, int head, int row, int rows,
                   int warp, CallSite at = call_site()) {
  const FastDivmod& page = p.sequences.page_divmod;
  constexpr int SHARE = ceil_div(PIECES, TILE_LOADERS);
  const int first = warp * SHARE, begin = row + first * PIECE_ROWS, mine = min_of(SHARE, (rows < T::rows ? pieces_of(rows) : PIECES) - first);
  arrive_expect_tx(pipeline.full(), max_of(mine, 0) * PIECE_ROWS * T::panels * 128, at);
  int in_page = begin - int(divide(begin, page) * page.divisor);
  #pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    if (i >= mine) break;
    const int element = value_of_lane(places.page, places.lane + first + i);
    start_piece(pipeline, (first + i) * PIECE_ROWS, PIECE_ROWS, map, element, head, in_page, at);
    in_page = in_page + PIECE_ROWS < int(page.divisor) ? in_page + PIECE_ROWS : 0;
  }
  pipeline.advance();
}
template <typename T, int DEPTH, Lanes LANES>
OP void load_pages_clipped(Pipeline<T, DEPTH, LANES>& pipeline, Clipping& clipping, const HopperVarlenParams& p, const TensorMap& map, const PiecePlaces& places,
                           int head, int row, int rows, int warp, CallSite at = call_site()) {
  if (rows >= T::rows) return load_pages(pipeline, p, map, places, head, row, rows, warp, at);
  clip(pipeline, clipping, rows, warp, [&](Pipeline<T, 1, LANES>& alone) { load_pages(alone, p, map, places, head, row, rows, warp, at); }, at);
}

// The tile of a sequence from key `row` on, which is the next one but where a query tile begins: of the warps that load the first half brings its keys,
// the others its values.
template <typename Keys, typename Values, typename Params, typename Coord>
OP void bring_pages(Keys& keys, Values& values, Clipping& clipping, const Params& p, const Coord& of, PagePlaces& places, int row, int warp, bool begins,
                    CallSite at = call_site()) {
  if constexpr (PAGED) {
    const int loader = warp % TILE_LOADERS, rows = of.kv.len() - row;
    find_pages(places, p, of, row, loader, begins);           // before a stage is waited for: what is done after that, the consumers wait for
    if (warp < TILE_LOADERS) {
      producer_acquire(keys, at);                             // without it keys are overwritten that a slower warp still reads
      if constexpr (COPIED_PAGES) copy_pages(keys, p, p.k, p.sequences.k_page_stride, places, of.head, row, rows, loader, at);
      else load_pages(keys, p, p.k_map, places, of.head, row, rows, loader, at);
    } else {
      producer_acquire(values, at);                           // the same of values
      if constexpr (COPIED_PAGES) copy_pages(values, p, p.v, p.sequences.v_page_stride, places, of.head, row, rows, loader, at);
      else load_pages_clipped(values, clipping, p, p.v_map, places, of.head, row, rows, loader, at);
    }
  }
}

// Keys, or values, of a sequence one behind the other. Of values, rows beyond its end become zeros.
template <typename Keys, typename Params, typename Coord> OP void load_keys(Keys& keys, const Params& p, const Coord& of, int row) {
  load_async(keys, p.k_map, of.batch, of.head, of.kv.first() + row);
}
template <typename Values, typename Params, typename Coord> OP void load_values(Values& values, Clipping& clipping, const Params& p, const Coord& of, int row) {
  load_clipped(values, clipping, p.v_map, of.batch, of.head, of.kv.first() + row, of.kv.len() - row);
}

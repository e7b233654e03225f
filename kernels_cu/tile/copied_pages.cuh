// copied_pages.cuh -- keys and values in pages of fewer keys than TMA brings at a time (COPIED_PAGES): lanes of the producer copy them. Four lanes
// have 64 bytes of a row, a warp the same part of eight rows, so that a lane goes to another row as seldom as it can while all that a cache line
// of device memory is read for is used.
#pragma once
#include "tile/copy.cuh"
#include "tile/pipeline.cuh"
#include "tile/work.cuh"

// The pages of the rows of a tile, for each lane those of rows l, l + 32 ...
struct RowPlaces {
  Regs<int, 1> page[ceil_div(TILE_KV, 32)];
};
// Of the tile of a sequence from key `row` on. Of rows beyond its end no entry is read.
template <typename Params, typename Coord> OP void find_pages(RowPlaces& places, const Params& p, const Coord& of, int row, bool) {
  const SequenceParams& s = p.sequences;
  #pragma unroll
  for (int i = 0; i < ceil_div(TILE_KV, 32); ++i) {
    for_lane(l) {
      const int key = row + 32 * i + l;
      places.page[i].at(l, 0) = 0;
      if (key < min_of(of.kv.len(), row + TILE_KV))
        places.page[i].at(l, 0) = read_length(s, s.pages, PAGES, i64(of.batch_number) * s.pages_of_sequence + divide(key, s.page_divmod), s.rows_of_cache - 1);
    }
  }
}

// Lanes copy the tile at hand, 16 bytes or zeros at a time: between its begin and its end.
template <typename T, int DEPTH, Lanes LANES> OP void begin_copies([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline, [[maybe_unused]] CallSite at) {
#if !ON_GPU
  host::self->block->arrive(warp_id(), pipeline.full().address, T::bytes, at);
#endif
}
template <typename T, int DEPTH, Lanes LANES>
OP void start_copy([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline, SharedAddress to, const void* from, bool exists, [[maybe_unused]] CallSite at) {
#if ON_GPU
  cp_async<16>(to, from, !exists);
#else
  host::self->block->load_async(warp_id(), pipeline.full().address, {16, [=] {
    count_read(16 * exists);
    if (exists) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
  }}, at);
#endif
}
template <typename T, int DEPTH, Lanes LANES> OP void end_copies([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline, [[maybe_unused]] CallSite at) {
#if ON_GPU
  cp_async_mbarrier_arrive(pipeline.full().address);
  __syncwarp();                                               // without it the last arrival comes before all lanes have counted themselves
  arrive_at<LANES>(pipeline.full(), at);
#endif
}

// The stage at hand = the tile of keys or values from key `row` on, of which so many rows exist, and zeros; goes on to the next one.
template <typename T, int DEPTH, Lanes LANES>
OP void copy_pages(Pipeline<T, DEPTH, LANES>& pipeline, const HopperVarlenParams& p, const Tensor& from, i64 page_stride, const RowPlaces& places,
                   int head, int row, int rows, CallSite at = call_site()) {
  const FastDivmod& page = p.sequences.page_divmod;
  const Element* const base = static_cast<const Element*>(from.data) + head * from.head_stride;
  const T tile = pipeline.tile();
  begin_copies(pipeline, at);
  #pragma unroll
  for (int first = 0; first < T::rows; first += 32) {
    Regs<i64, 1> offset;
    for_lane(l) {
      const int key = row + first + l;
      offset.at(l, 0) = places.page[first / 32].at(l, 0) * page_stride + (key - int(divide(key, page) * page.divisor)) * from.row_stride;
    }
    #pragma unroll
    for (int eight = first; eight < min_of(first + 32, T::rows); eight += 8) {
      for_lane(lane) {
        const int l = GROUPS == 3 ? not_ahead(lane) : lane;   // kept, addresses would take more registers than this producer has
        const Element* const of_lane = base + value_of_lane(offset, (eight + l / 4) % 32) + l % 4 * 8;
        #pragma unroll
        for (int i = 0; i < 2 * T::panels; ++i)
          start_copy(pipeline, tile.panel(i / 2).chunk_at(eight, l / 4, i % 2 * 4, l % 4), of_lane + 32 * i, eight + l / 4 < rows, at);
      }
    }
  }
  end_copies(pipeline, at);
  pipeline.advance();
}

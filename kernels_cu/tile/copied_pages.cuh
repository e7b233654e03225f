// copied_pages.cuh -- keys and values in pages of fewer keys than TMA brings at a time (COPIED_PAGES): lanes of the producer copy them. Each warp
// of a tile has some of its rows, which follow each other. Four lanes have 64 bytes of a row, a warp the same part of eight rows, so that a lane
// goes to another row as seldom as it can while all that a cache line of device memory is read for is used.
#pragma once
#include "tile/copy.cuh"
#include "tile/pipeline.cuh"
#include "tile/work.cuh"

constexpr int COPIED_ROWS = ceil_div(TILE_KV, 8 * TILE_LOADERS) * 8; // of a tile, by a warp
// An entry of the page table as it stands there, any number; of 64 bits, one that stands for it. 0 of a sequence without keys, which may have none.
OP int read_page(const SequenceParams& s, i64 entry, int last_key) {
  if (last_key < 0) return 0;
  if (s.wide & PAGES) return read_length(s, s.pages, PAGES, entry, s.rows_of_cache - 1);
  count_read(sizeof(int));
  return static_cast<const int*>(s.pages)[entry];
}
// The pages of these rows, for each lane those of rows l, l + 32 ... and what the table says of the next tile
struct RowPlaces {
  Regs<int, 1> page[ceil_div(COPIED_ROWS, 32)], next[ceil_div(COPIED_ROWS, 32)];
};
// Of the tile of a sequence from key `row` on, which is the next one but where a query tile begins. What the table says is read a tile ahead, and
// used only then: reading takes about as long as copying. Of rows beyond the sequence's end, it is read for the last row again.
template <typename Params, typename Coord> OP void find_pages(RowPlaces& places, const Params& p, const Coord& of, int row, int warp, bool begins) {
  const SequenceParams& s = p.sequences;
  const i64 first = i64(of.batch_number) * s.pages_of_sequence;
  const int last = of.kv.len() - 1;
  #pragma unroll
  for (int i = 0; i < ceil_div(COPIED_ROWS, 32); ++i) {
    for_lane(l) {
      const auto entry = [&](int row) { return first + divide(max_of(min_of(row + warp * COPIED_ROWS + 32 * i + l, last), 0), s.page_divmod); };
      if (begins) places.next[i].at(l, 0) = read_page(s, entry(row), last);
      places.page[i].at(l, 0) = max_of(min_of(places.next[i].at(l, 0), s.rows_of_cache - 1), 0);
      places.next[i].at(l, 0) = read_page(s, entry(row + TILE_KV), last);
    }
  }
}

// Lanes copy so many bytes of the tile at hand, 16 bytes or zeros at a time: between its begin and its end. On a GPU each lane arrives by itself.
template <typename T, int DEPTH, Lanes LANES> OP void begin_copies([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline, [[maybe_unused]] int bytes, [[maybe_unused]] CallSite at) {
#if !ON_GPU
  host::arrive(warp_id(), pipeline.full().address, bytes, at);
#endif
}
template <typename T, int DEPTH, Lanes LANES>
OP void start_copy([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline, SharedAddress to, const void* from, bool exists, [[maybe_unused]] CallSite at) {
#if ON_GPU
  cp_async<16>(to, from, !exists);
#else
  host::load_async(warp_id(), pipeline.full().address, 16, [=] {
    count_read(16 * exists);
    if (exists) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
  }, at);
#endif
}
template <typename T, int DEPTH, Lanes LANES> OP void end_copies([[maybe_unused]] const Pipeline<T, DEPTH, LANES>& pipeline) {
#if ON_GPU
  cp_async_mbarrier_arrive_noinc(pipeline.full().address);
#endif
}

// The stage at hand = the tile of keys or values from key `row` on, of which so many rows exist, and zeros; goes on to the next one.
template <typename T, int DEPTH, Lanes LANES>
OP void copy_pages(Pipeline<T, DEPTH, LANES>& pipeline, const HopperVarlenParams& p, const Tensor& from, i64 page_stride, const RowPlaces& places,
                   int head, int row, int rows, int warp, CallSite at = call_site()) {
  const FastDivmod& page = p.sequences.page_divmod;
  const Element* const base = static_cast<const Element*>(from.data) + head * from.head_stride;
  const int begin = warp * COPIED_ROWS, end = min_of(begin + COPIED_ROWS, T::rows);
  const SharedAddress tile = pipeline.tile().base + begin * 128;
  begin_copies(pipeline, (end - begin) * T::panels * 128, at);
  #pragma unroll
  for (int first = 0; first < COPIED_ROWS; first += 32) {
    Regs<i64, 1> offset;
    for_lane(l) {
      const int key = row + begin + first + l;
      offset.at(l, 0) = places.page[first / 32].at(l, 0) * page_stride + (key - int(divide(key, page) * page.divisor)) * from.row_stride;
    }
    #pragma unroll 2                                         // of more, addresses would spill
    for (int eight = first; eight < min_of(first + 32, COPIED_ROWS); eight += 8) {
      if (begin + eight >= end) break;
      for_lane(lane) {
        const u32 l = u32(not_ahead(lane));                   // kept, addresses would take more registers than this producer has
        const Element* const of_lane = base + value_of_lane(offset, eight - first + int(l / 4)) + l % 4 * 8;
        #pragma unroll
        for (int i = 0; i < 2 * T::panels; ++i)
          start_copy(pipeline, T{tile}.panel(i / 2).chunk_at(eight, int(l / 4), i % 2 * 4, int(l % 4)), of_lane + 32 * i, begin + eight + int(l / 4) < rows, at);
      }
    }
  }
  end_copies(pipeline);
  pipeline.advance();
}

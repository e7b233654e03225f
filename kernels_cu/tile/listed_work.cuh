// listed_work.cuh -- the query tiles of fwd_hopper.cu with lists of key tiles (TILE_LIST). How many key tiles each has is known on the device alone,
// and not to who deals tiles out before. So blocks take them in turn, those with most key tiles first: who has long ones takes fewer.
//
//   fwd_hopper_schedule    one block for each batch element: its query tiles by how many key tiles they have, see schedule.cuh. Where heads have
//                          lists of their own, by those of the first head, which is as good as any: what is in order decides no result
//   fwd_hopper             a few heads of a batch element take turns with its tiles, and then the next ones, so that keys and values are in the L2 cache
//                          STAGED_BIAS: so do batch elements that share a bias, see SHARERS_ALTERNATE
#pragma once
#include "tile/consumer_lists.cuh"
#include "tile/schedule.cuh"

// Batch elements that share a bias take turns, so that it comes from device memory once for all of them. Where a tile takes longer than its bias,
// which is so of wide heads, that would only have keys and values of more elements in the L2 cache. As `listed_sharers_in_turn` (shared_bias.py) has it.
constexpr bool SHARERS_ALTERNATE = STAGED_BIAS && max_of(WIDTH, WIDTH_V) <= 32 * int(sizeof(BiasElement));

// By one warp: how many key tiles the query tile at `row` has, of consumers with so many rows each. Lanes have words of 32 tiles of each consumer.
OP int count_key_tiles(const HopperForwardParams& p, u32 batch_number, int row, int rows, int consumers) {
  const int apart = OWN_LISTS ? rows : rows * consumers, lists = ceil_div(p.len_q, apart), first = row / apart;
  const TileList list = tile_list(p.scores.tiles, batch_number, 0, first, lists, ceil_div(p.len_kv, TILE_KV));
  const int with_rows = OWN_LISTS ? min_of(consumers, lists - first) : 1;
  Regs<int, 1> count;
  for_lane(l) {
    count.at(l, 0) = 0;
    #pragma unroll 1
    for (int number = l; number < list.words; number += 32) {
      u32 any = 0;
      #pragma unroll
      for (int c = 0; c < (OWN_LISTS ? MOST_CONSUMERS : 1); ++c) any |= read_bits(list.any + min_of(c, with_rows - 1) * 2 * list.words + number);
      count.at(l, 0) += ones(any);
    }
  }
  reduce_lanes<32>(count, [](int a, int b) { return a + b; });
  return count.at(0, 0);
}

// Query tile number `number` of all batch elements, which has been counted, as `scheduled_tile` of sequences.
OP ScheduledTile<ListedItem> scheduled_tile(const HopperForwardParams& p, const ListedItem* work, u32 number) {
  const u32 tile = number - divide(number, p.tiles_of_head_divmod) * p.tiles_of_head_divmod.divisor;
  count_read(sizeof(u32));
  return {{int(tile) * TILE_Q, 0}, max_of(int(work[1 + tile].taken), 1)};
}
struct CountedTiles {
  const HopperForwardParams& p;
  const ListedItem* work;
  u32 first, count;
  template <typename Each> OP void operator()(const Each& each) const {
    for_lane(l) {
      for (u32 i = Block::thread(l); i < count; i += Block::threads) each(scheduled_tile(p, work, first + i));
    }
  }
};
OP void begin_list(ListedItem& first, int, int) { first.taken = 0; }
OP void write_item(ListedItem& to, const ListedItem& item) {  // beside what has been counted of another tile, which may be read still
  count_written(sizeof(int));
  to.row = item.row;
}
OP void schedule_queries(const HopperForwardParams& p) {
  const u32 tiles = p.tiles_of_head_divmod.divisor;
  ListedItem* const work = p.work + block_id() * (1 + tiles);
  #pragma unroll 1
  for (u32 tile = warp_id(); tile < tiles; tile += WARPS) {
    const int count = count_key_tiles(p, block_id(), int(tile) * TILE_Q, TILE_Q / (WARPS / 4 - 1), WARPS / 4 - 1);
    for_lane(l) if (l == 0) count_written(sizeof(u32)), work[1 + tile].taken = u32(count);
  }
  sync_block();                                               // without it tiles are in order by what has not been counted
  schedule_tiles(p, work, tiles, CountedTiles{p, work, block_id() * tiles, tiles});
}

// Where the query tile is that has this number in the order in which blocks take them.
OP BlockCoord listed_tile_coord(const HopperForwardParams& p, u32 number) {
  u32 element = 0;                                            // of those in turn
  if constexpr (SHARERS_ALTERNATE) {
    const u32 of_element = divide(number, p.in_turn_divmod);
    element = number - of_element * p.in_turn_divmod.divisor, number = of_element;
  }
  const u32 tiles = p.tiles_of_head_divmod.divisor, together = p.heads_together_divmod.divisor, group = number / (together * tiles);
  const u32 of_group = number - group * together * tiles, place = divide(of_group, p.heads_together_divmod), head = group * together + of_group - place * together;
  BlockCoord here;
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads);
  if constexpr (SHARERS_ALTERNATE) here.batch_number = here.batch_number * p.in_turn_divmod.divisor + element;
  count_read(sizeof(ListedItem));
  here.row = p.work[here.batch_number * (1 + tiles) + 1 + place].row;
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

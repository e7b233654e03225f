// schedule.cuh -- the query tiles that sequences of their own lengths have (VARLEN), those with most keys first: what blocks take in turn. A block
// finds them on the device before, so that nobody waits for lengths, and with the long ones first no multiprocessor is left with one at the end.
//
//   counts[bin] = query tiles with about so many key tiles        of 128 bins, four for each power of two
//   starts[bin] = those of longer bins
//   work[starts[bin]++] = tile                                    for each tile, in any order within its bin
//
// SPLIT_KV, fwd_hopper: the same of the splits of these tiles.
#pragma once
#include "tile/key_splits.cuh"
#include "tile/sequence.cuh"

constexpr u32 WHOLE = ~u32(0);                                // in place of the number of a split: all of a query tile
constexpr int BINS = 128;
constexpr int SCHEDULE_BYTES = 2 * BINS * int(sizeof(u32));

// The bin of a query tile that visits so many key tiles: their number in floating point, with two bits behind the first.
OP int bin_of(int tiles) {
  if (tiles < 4) return tiles;
  const int exponent = 31 - zeros_above(u32(tiles));
  return 4 * (exponent - 1) + (tiles >> (exponent - 2) & 3);
}

// What blocks are told of a query tile: which it is, or where its sequence lies as well.
template <typename Seq> OP void place(WorkItem&, const Seq&) {}
template <typename Seq> OP void place(PlacedWorkItem& item, const Seq& seq) {
  item.begin_q = seq.q.begin, item.len_q = seq.q.count, item.room_q = seq.q.room;
  item.begin_kv = seq.kv.begin, item.len_kv = seq.kv.count;
}
template <typename Params> struct ItemOf { typedef WorkItem type; };
template <> struct ItemOf<HopperVarlenParams> { typedef PlacedWorkItem type; };
// and of all, in their first item: how many there are, and how many of these have queries
OP void begin_list(WorkItem& first, int tiles, int with_queries) { first = {tiles, with_queries}; }
OP void begin_list(PlacedWorkItem& first, int tiles, int with_queries) { first.sequence = tiles, first.row = with_queries, first.taken = 0; }

// A query tile, and how many key tiles it visits: of a query that sees no key it is 1, of rows that are no queries 0, which come last.
template <typename Item> struct ScheduledTile { Item item; int key_tiles; ColumnRange keys; };
template <typename Item, typename Params> OP ScheduledTile<Item> scheduled_tile(const Params&, const VarlenSequence<Params>& seq, u32 sequence, int row) {
  ScheduledTile<Item> found{};
  found.item.sequence = int(sequence), found.item.row = row;
  place(found.item, seq);
  if (row >= seq.q.len()) return found;
  const ColumnRange keys = visible_keys(Mask{seq.mask(), seq.kv.len()}, row, min_of(TILE_Q, seq.q.len() - row));
  found.key_tiles = max_of(keys.last < keys.first ? 0 : keys.last / TILE_KV - keys.first / TILE_KV + 1, 1);
  if constexpr (SPLIT_KV) found.keys = keys;
  return found;
}
// Calls each(tile) with all query tiles, by the warps of a block. A lane reads where a sequence lies, and takes its first tiles; of longer ones the lanes deal
// out the others, one sequence after the other, each of which takes as long as some tiles. A search for the sequence of a tile would take as long as several
// reads. Each warp has its own sequences; or of so few that one warp would have all, the warps share the tiles of each.
constexpr int OWN_TILES = 4;                                  // of a lane
template <typename Item, typename Params, typename Each> OP void for_scheduled_tiles(const Params& p, const Each& each) {
  const u32 sequences = u32(p.sequences.sequences) + (offsets_of<QUERIES>(p) ? 1 : 0);       // rows behind the last one are one more
  const bool shared = sequences <= 32;
  const u32 at_once = shared ? 32 : min_of(ceil_div(int(sequences), WARPS), 32);
  const int threads = shared ? Block::threads : 32;
  #pragma unroll 1
  for (u32 first = shared ? 0 : warp_id() * at_once; first < sequences; first += at_once * WARPS) {
    Regs<int, 1> begin_q, len_q, room_q, begin_kv, len_kv;
    for_lane(l) {
      if (l < at_once && first + l < sequences) {
        const auto seq = sequence_of(p, first + l);
        begin_q.at(l, 0) = seq.q.begin, len_q.at(l, 0) = seq.q.count, room_q.at(l, 0) = seq.q.room;
        begin_kv.at(l, 0) = seq.kv.begin, len_kv.at(l, 0) = seq.kv.count;
      }
    }
    const int apart = shared ? WARPS * TILE_Q : TILE_Q, own_rows = OWN_TILES * apart;
    Regs<bool, 1> has_more;
    for_lane(l) {
      const bool exists = l < at_once && first + l < sequences;
      const SequenceRows q{begin_q.at(l, 0), len_q.at(l, 0), room_q.at(l, 0), 0, 0}, kv{begin_kv.at(l, 0), len_kv.at(l, 0), 0, 0, 0};
      const VarlenSequence<Params> seq{q, kv, mask_of_sequence(p, q.count, kv.count)};
      #pragma unroll 1
      for (int row = shared ? warp_id() * TILE_Q : 0; exists && row < min_of(q.room, own_rows); row += apart) each(scheduled_tile<Item>(p, seq, first + l, row));
      has_more.at(l, 0) = exists && q.room > own_rows;
    }
    #pragma unroll 1
    for (u32 left = warp_ballot(has_more); left; left &= left - 1) {
      const int i = lowest_bit(left);
      const SequenceRows q{value_of_lane(begin_q, i), value_of_lane(len_q, i), value_of_lane(room_q, i), 0, 0};
      const SequenceRows kv{value_of_lane(begin_kv, i), value_of_lane(len_kv, i), 0, 0, 0};
      const VarlenSequence<Params> seq{q, kv, mask_of_sequence(p, q.count, kv.count)};
      for_lane(l) {
        #pragma unroll 1
        for (int row = own_rows + (shared ? l * WARPS + warp_id() : l) * TILE_Q; row < q.room; row += threads * TILE_Q) each(scheduled_tile<Item>(p, seq, first + i, row));
      }
    }
  }
}
// Calls each(item, key tiles) with the tile, or with its splits.
template <typename Params, typename Item, typename Each> OP void for_splits(const Params&, const ScheduledTile<Item>& tile, const Each& each) { each(tile.item, tile.key_tiles); }
template <typename Each> OP void for_splits(const HopperVarlenParams& p, const ScheduledTile<PlacedWorkItem>& tile, const Each& each) {
  if constexpr (!SPLIT_KV) {
    each(tile.item, tile.key_tiles);
  } else {
    const KeySplits splits = splits_of_keys(p, p.most_splits, tile.item.len_kv, tile.keys);
    for (int split = splits.first; split <= splits.last; ++split) {
      const int begin = max_of(tile.keys.first, split * splits.keys), end = min_of(tile.keys.last + 1, (split + 1) * splits.keys);
      PlacedWorkItem item = tile.item;
      item.taken = splits.is_one() ? WHOLE : u32(split);
      each(item, max_of(ceil_div(end, TILE_KV) - begin / TILE_KV, 1));
    }
  }
}

template <typename Item> OP void write_item(Item& to, const Item& item) {
  count_written(sizeof item);
  to = item;
}

// How many items so many tiles have at most.
template <typename Params> OP u32 items_of(const Params&, u32 tiles) { return tiles; }
OP u32 items_of(const HopperVarlenParams& p, u32 tiles) { return SPLIT_KV ? tiles * p.most_splits : tiles; }

// By one block: the tiles with which for_tiles(each) calls `each` by any lane, `most` of them at most. It is called twice.
template <typename Params, typename Item, typename ForTiles> OP void schedule_tiles(const Params& p, Item* work, u32 most, const ForTiles& for_tiles) {
  const SharedAddress counts_smem = shared_memory(), starts_smem = counts_smem + BINS * int(sizeof(u32));
  for_lane(l) {
    for (int i = Block::thread(l); i < BINS; i += Block::threads) store_shared(counts_smem + i * int(sizeof(u32)), u32(0));
  }
  sync_block();                                               // without it counts begin with what was there
  for_tiles([&](const ScheduledTile<Item>& tile) {
    for_splits(p, tile, [&](const Item&, int key_tiles) { add_shared(counts_smem + bin_of(key_tiles) * int(sizeof(u32)), 1); });
  });
  sync_block();                                               // without it tiles are missing that have not been counted
  for_lane(l) {
    for (int i = Block::thread(l); i < BINS; i += Block::threads) {
      u32 longer = 0;
      for (int bin = i + 1; bin < BINS; ++bin) longer += load_shared<u32>(counts_smem + bin * int(sizeof(u32)));
      store_shared(starts_smem + i * int(sizeof(u32)), longer);
      // where offsets do not rise there may be more, which have no place
      if (i == 0) begin_list(work[0], int(min_of(longer + load_shared<u32>(counts_smem), items_of(p, most))), int(min_of(longer, items_of(p, most))));
    }
  }
  sync_block();                                               // without it tiles have places that are not known yet
  for_tiles([&](const ScheduledTile<Item>& tile) {
    for_splits(p, tile, [&](const Item& item, int key_tiles) {
      const u32 place = add_shared(starts_smem + bin_of(key_tiles) * int(sizeof(u32)), 1);
      if (place < items_of(p, most)) write_item(work[1 + place], item); // or lengths have changed meanwhile, and nothing else is written over
    });
  });
}
template <typename Params> struct TilesOfSequences {
  const Params& p;
  template <typename Each> OP void operator()(const Each& each) const { for_scheduled_tiles<typename ItemOf<Params>::type>(p, each); }
};
template <typename Params> OP void schedule_queries(const Params& p) {
  schedule_tiles(p, p.work, tiles_of<QUERIES>(p) * (offsets_of<QUERIES>(p) ? 1 : p.batch[BATCH_AXES - 1]), TilesOfSequences<Params>{p});
}

// Where a block is, of so many for each query tile of a head; `row` is below 0 if there are fewer tiles.
OP BlockCoord scheduled_coord(const ForwardParams& p, u32 block) {
  const u32 number = block / p.heads;
  count_read(2 * sizeof(WorkItem));
  BlockCoord here;
  here.head = int(block - number * p.heads);
  const WorkItem item = number < u32(p.work[0].sequence) ? p.work[1 + number] : WorkItem{0, -1};
  here.batch_number = u32(item.sequence);
  here.row = item.row;
  batch_element(here.batch, p.batch, here.batch_number);
  return here;
}
// Of few queries whose keys are split there is no list: all splits are about equally long, and reading where a tile is would take as long as a key tile.
// So is dividing: here it is by products, but with dropout, which leaves no registers for their factors.
OP BlockCoord split_tile_coord(const ForwardParams& p, u32 number) {
  const u32 head = divide(number, p.tiles_divmod), tile = number - head * p.tiles_divmod.divisor;
  BlockCoord here;
  here.row = int(p.tiles_divmod.divisor - 1 - tile) * TILE_Q;
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads_divmod.divisor);
  batch_element(here.batch, p.batch, here.batch_number);
  return here;
}
constexpr bool SCHEDULED = VARLEN && !SPLIT_KV;
OP BlockCoord query_tile_coord(const ForwardParams& p, u32 block) {
  if constexpr (SCHEDULED) return scheduled_coord(p, block);
  else if constexpr (SPLIT_KV && !DROPOUT) return split_tile_coord(p, block);
  else return block_coord(p.batch, p.heads, p.len_q, TILE_Q, block);
}
// The same at the end of a block: computed again, instead of keeping it in registers that the loop needs.
OP decltype(auto) coord_again(const ForwardParams& p, const BlockCoord& here, u32 block) {
  if constexpr (VARLEN || SPLIT_KV) return query_tile_coord(p, block);
  else return (here);
}

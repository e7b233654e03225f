// consumer_lists.cuh -- the key tiles of a query tile of fwd_hopper.cu (TILE_LIST). At dims up to 64 each consumer has a list of its own, for its rows:
// the producer loads what any of them sees, and tells with the number of a key tile what is in it for each. Where a document ends, one consumer
// asks pairs then, and not all four. Of two groups that is not worth what it takes in each step, as measured: wider rows have one list.
#pragma once
#include "tile/tile_list.cuh"

constexpr bool OWN_LISTS = TILE_LIST && max_of(WIDTH, WIDTH_V) <= 64;           // as `rows_of_list` in classify.py has it
// What is told: the number of a key tile; and for each consumer, whether all its pairs take part, and whether none does. Or the number, and above
// it whether all pairs take part. There are fewer than 2^30 keys, and no row of a table has tiles of fewer than 64.
constexpr int MOST_CONSUMERS = 4, NUMBER_BITS = 32 - 2 * MOST_CONSUMERS;
constexpr u32 ALL_PAIRS = 1u << 31;
OP int told_number(u32 told) { return int(told & (OWN_LISTS ? (1u << NUMBER_BITS) - 1 : ~ALL_PAIRS)); }
OP bool told_all(u32 told, int consumer) { return OWN_LISTS ? told >> (NUMBER_BITS + consumer) & 1 : told & ALL_PAIRS; }
OP bool told_none(u32 told, int consumer) { return OWN_LISTS && told >> (NUMBER_BITS + MOST_CONSUMERS + consumer) & 1; }

struct ConsumerLists {
  Regs<const u32*, 1> own;                                    // lane l: of consumer l, or of the last one that has rows
  int words;                                                  // of a row of bits

  // The word that names tiles 32 * number ... of all consumers together.
  OP u32 word(int number) const {
    Regs<u32, 1> any;
    for_lane(l) any.at(l, 0) = l < MOST_CONSUMERS ? read_bits(own.at(l, 0) + number) : 0;
    return redux_or(any);
  }
  OP int next(int tile, int end) const {
    return TileList::next(tile, end, [&](int number) { return word(number); });
  }
  OP int previous(int tile, int first) const {
    return TileList::previous(tile, first, [&](int number) { return word(number); });
  }
  OP int count(int first, int end) const {
    return count_tiles(first, end, [&](int number) { return word(number); });
  }
};
// The same of a query tile that is gone through: words are waited for once, and not at each tile.
struct KeptConsumerLists : ConsumerLists {
  int number = -1;                                            // of the words that are kept; -1: none yet
  Regs<u32, 1> any, all;
  OP u32 keep(int wanted) {
    if (number != wanted) {
      number = wanted;
      for_lane(l) {
        any.at(l, 0) = l < MOST_CONSUMERS ? read_bits(own.at(l, 0) + number) : 0;
        all.at(l, 0) = l < MOST_CONSUMERS ? read_bits(own.at(l, 0) + words + number) : 0;
      }
    }
    return redux_or(any);
  }
  OP int next(int tile, int end) {
    return TileList::next(tile, end, [&](int number) { return keep(number); });
  }
  OP u32 tell(int tile) {
    Regs<bool, 1> of_all, of_none;
    keep(tile / 32);
    for_lane(l) {
      of_all.at(l, 0) = l < MOST_CONSUMERS && all.at(l, 0) >> tile % 32 & 1;
      of_none.at(l, 0) = l < MOST_CONSUMERS && !((any.at(l, 0) | all.at(l, 0)) >> tile % 32 & 1);
    }
    return u32(tile) | warp_ballot(of_all) << NUMBER_BITS | warp_ballot(of_none) << (NUMBER_BITS + MOST_CONSUMERS);
  }
};
// One list for all consumers, that is gone through. What is told besides the number is one bit.
struct KeptList : TileList {
  ListWords kept;
  OP int next(int tile, int end) { return TileList::next(tile, end, kept); }
  OP u32 tell(int tile) { return keep(kept, tile / 32), kept.is_whole(tile) ? ALL_PAIRS : 0; }
};

using QueryLists = Choose<OWN_LISTS, ConsumerLists, TileList>;
using KeptQueryLists = Choose<OWN_LISTS, KeptConsumerLists, KeptList>;
// Those of the query tile at `row`, of consumers with so many rows each.
template <typename Params, bool OWN = OWN_LISTS>
OP Choose<OWN, ConsumerLists, TileList> lists_of_queries(const Params& p, u32 batch_number, int head, int row, int rows, int consumers) {
  const int apart = OWN ? rows : rows * consumers, lists = ceil_div(p.len_q, apart), first = row / apart;
  const TileList list = tile_list(p.scores.tiles, batch_number, head, first, lists, ceil_div(p.len_kv, TILE_KV));
  if constexpr (OWN) {
    ConsumerLists found;
    found.words = list.words;
    for_lane(l) found.own.at(l, 0) = list.any + min_of(l, min_of(consumers, lists - first) - 1) * 2 * list.words;
    return found;
  } else {
    return list;
  }
}

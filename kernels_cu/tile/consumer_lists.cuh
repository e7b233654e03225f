// consumer_lists.cuh -- the key tiles of a query tile of fwd_hopper.cu (TILE_LIST). With OWN_LISTS each consumer has a list for its own rows:
// the producer loads what any of them sees, and tells with the number of a key tile what is in it for each. Where a document ends, one consumer
// asks pairs then, and not all four. Of two groups, which wider rows have, that is not worth what it takes in each step, as measured.
#pragma once
#include "tile/tile_list.cuh"

static_assert(!OWN_LISTS || TILE_LIST, "lists of consumers are lists");
// What a consumer is told of a key tile: its number, and above it whether no pair is masked one by one, whether none is seen, and with OWN_LISTS
// whether none of the next key tile is, which then is passed by. Each has a word of its own, whose bits are where one operation asks for them.
constexpr int MOST_CONSUMERS = 4;
constexpr int TOLD_WORDS = OWN_LISTS ? MOST_CONSUMERS : 1;
constexpr u32 ALL_PAIRS = 1u << 31, NO_PAIRS = 1u << 30, NEXT_NONE = 1u << 29;
OP int told_number(u32 told) { return int(told & ~(ALL_PAIRS | NO_PAIRS | NEXT_NONE)); }
OP bool told_none(u32 told) { return told & NO_PAIRS; }
OP bool told_to_ask(u32 told) { return !(told & (ALL_PAIRS | NO_PAIRS)); }
OP bool told_next_none(u32 told) { return OWN_LISTS && told & NEXT_NONE; }

// The same as the producer has it, for all consumers, which leaves as a word for each.
struct ToldTile {
  u32 number, of_consumers;                                   // four bits for each
};
struct alignas(16) ToldWords {
  u32 of[MOST_CONSUMERS];
};
OP void store_told(SharedAddress to, const ToldTile& told) {
  ToldWords words;
  #pragma unroll
  for (int c = 0; c < MOST_CONSUMERS; ++c) words.of[c] = told.number | told.of_consumers >> 4 * c << 29;
  store_once(to, words);
}
OP void store_told(SharedAddress to, u32 word) { store_once(to, word); }
using Told = Choose<OWN_LISTS, ToldTile, u32>;

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
// The same of a query tile that is gone through. What is told is found of 32 tiles at once, since keys come just in time.
struct KeptConsumerLists : ConsumerLists {
  int number = -1;                                            // of the words that are kept; -1: none yet
  u32 seen;                                                   // their tiles that any consumer sees
  Regs<u32, 1> told;                                          // lane l: of tile 32 * number + l, but for its number, four bits for each consumer
  OP u32 keep(int wanted) {
    if (number != wanted) {
      number = wanted;
      Regs<u32, 1> any, all;
      for_lane(l) {
        any.at(l, 0) = l < MOST_CONSUMERS ? read_bits(own.at(l, 0) + number) : 0;
        all.at(l, 0) = l < MOST_CONSUMERS ? read_bits(own.at(l, 0) + words + number) : 0;
        told.at(l, 0) = 0;
      }
      seen = redux_or(any);
      #pragma unroll
      for (int c = 0; c < MOST_CONSUMERS; ++c) {
        const u32 whole = value_of_lane(all, c), none = ~value_of_lane(any, c);
        for_lane(l) {
          const u32 behind = seen >> l >> 1;
          const int next = behind ? l + 1 + lowest_bit(behind) : l;
          told.at(l, 0) |= ((whole >> l & 1) << 2 | (none >> l & 1) << 1 | (none >> next & 1)) << 4 * c;
        }
      }
    }
    return seen;
  }
  OP int next(int tile, int end) {
    return TileList::next(tile, end, [&](int number) { return keep(number); });
  }
  OP ToldTile tell(int tile, int end) {
    keep(tile / 32);
    u32 of_tile = value_of_lane(told, tile % 32);
    if (!(seen >> tile % 32 >> 1)) {                          // the next one is in another word
      const int following = next(tile + 1, end);
      const u32 none = following < end ? value_of_lane(told, following % 32) & 0x2222 : 0;
      of_tile = (of_tile & 0x6666) | none >> 1;
    }
    return {u32(tile), of_tile};
  }
};
// One list for all consumers, that is gone through.
struct KeptList : TileList {
  ListWords kept;
  OP int next(int tile, int end) { return TileList::next(tile, end, kept); }
  OP u32 tell(int tile, int) {                                // without TILE_LIST the number alone
    if constexpr (!TILE_LIST) return u32(tile);
    keep(kept, tile / 32);
    return u32(tile) | (kept.is_whole(tile) ? ALL_PAIRS : 0) | (kept.any >> tile % 32 & 1 ? 0 : NO_PAIRS);
  }
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

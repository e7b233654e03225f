// tile_list.cuh -- the tiles of pairs that a block visits (TILE_LIST): those in which a pair takes part. classify.cu finds them before.
//
// For each query tile a list of key tiles; in the backward, for each key tile a list of query tiles. A list is two rows of bits, in words
// of 32 tiles: `any`, whether a pair of a tile takes part, MaskParams included, and `all`, whether no pair of it is masked one by one.
// Masks that do not tell heads or batch elements apart have one list for all of them.
#pragma once
#include "params.cuh"
#include "tile/mask.cuh"
#include "tile/scheduler.cuh"

OP u32 read_bits(const u32* words) {
  count_read(sizeof(u32));
  return *words;
}
OP int words_of(int tiles) { return ceil_div(tiles, 32); }

// How many of the tiles first ... end - 1 a row of bits names.
template <typename Word> OP int count_tiles(int first, int end, Word word) {
  int count = 0;
  #pragma unroll 1
  for (int number = first / 32; number < words_of(end); ++number) {
    const int from = max_of(first - number * 32, 0);
    count += ones(word(number) & bmsk(from, end - number * 32 - from));
  }
  return count;
}
OP int count_tiles(const u32* bits, int first, int end) {
  return count_tiles(first, end, [&](int number) { return read_bits(bits + number); });
}

// The words of a list that name some 32 tiles, so that who goes from tile to tile waits for them once, and not at each.
struct ListWords {
  int number = -1;                                            // tiles 32 * number ...; -1: none yet
  u32 any, all;
  OP bool is_whole(int tile) const { return all >> tile % 32 & 1; }
};

// The tiles that a query tile, or a key tile, sees.
struct TileList {
  const u32* any;
  int words;
  OP void keep(ListWords& kept, int number) const {
    if (kept.number != number) kept = {number, read_bits(any + number), read_bits(any + words + number)};
  }
  // the first one from `tile` on, or `end`
  OP int next(int tile, int end) const {
    return next(tile, end, [&](int number) { return read_bits(any + number); });
  }
  OP int next(int tile, int end, ListWords& kept) const {
    return next(tile, end, [&](int number) { return keep(kept, number), kept.any; });
  }
  template <typename Word> static OP int next(int tile, int end, Word word) {
    #pragma unroll 1
    while (tile < end) {
      const u32 rest = word(tile / 32) >> tile % 32;
      if (rest) return min_of(tile + lowest_bit(rest), end);
      tile = (tile / 32 + 1) * 32;
    }
    return end;
  }
  // the last one up to `tile`, or first - 1
  OP int previous(int tile, int first) const {
    return previous(tile, first, [&](int number) { return read_bits(any + number); });
  }
  OP int previous(int tile, int first, ListWords& kept) const {
    return previous(tile, first, [&](int number) { return keep(kept, number), kept.any; });
  }
  template <typename Word> static OP int previous(int tile, int first, Word word) {
    #pragma unroll 1
    while (tile >= first) {
      const u32 rest = word(tile / 32) << (31 - tile % 32);
      if (rest) return max_of(tile - zeros_above(rest), first - 1);
      tile = tile / 32 * 32 - 1;
    }
    return first - 1;
  }
  OP int count(int first, int end) const { return count_tiles(any, first, end); }
  OP bool is_whole(int tile) const { return read_bits(any + words + tile / 32) >> tile % 32 & 1; }
};

// Which of those lists a head has that masks tell apart, and how many words all lists take, of so many tiles each.
OP u32 list_number(const TileLists& lists, u32 batch_number, int head) {
  return (lists.batches > 1 ? batch_number : 0) * lists.heads + (lists.heads > 1 ? head : 0);
}
OP u32 words_of_lists(const TileLists& lists, u32 tiles, u32 others) { return lists.batches * lists.heads * tiles * 2 * ((others + 31) / 32); }

// The list of tile number `tile` of `tiles`, which names some of `others`.
OP TileList tile_list(const TileLists& lists, u32 batch_number, int head, int tile, int tiles, int others) {
  const int words = words_of(others);
  const i64 number = list_number(lists, batch_number, head);
  return {lists.lists + (number * tiles + tile) * 2 * words, words};
}
// PACK_GQA: rows are queries of several heads, which all have one list.
template <typename Params> OP TileList list_of_queries(const Params& p, u32 batch_number, int head, int tile) {
  if constexpr (PACK_GQA) return tile_list(p.scores.tiles, batch_number, head, 0, 1, ceil_div(p.len_kv, TILE_KV));
  return tile_list(p.scores.tiles, batch_number, head, tile, ceil_div(p.len_q, TILE_Q), ceil_div(p.len_kv, TILE_KV));
}
template <typename Params> OP TileList list_of_keys(const Params& p, u32 batch_number, int head, int tile) {
  return tile_list(p.scores.tiles, batch_number, head, tile, ceil_div(p.len_kv, TILE_KV), ceil_div(p.len_q, TILE_Q));
}
// From the first of these tiles that a list names to the last; if it names none, the first of them.
template <typename List> OP NBlockRange listed_range(const List& list, const NBlockRange& tiles) {
  const int first = list.next(tiles.begin, tiles.end);
  if (first == tiles.end) return {tiles.begin, tiles.begin + 1};
  return {first, list.previous(tiles.end - 1, first) + 1};
}
// How many of the key tiles first ... end - 1 see a query tile: of lists by keys, a column.
template <typename Params> OP int count_column(const Params& p, u32 batch_number, int head, int tile, int first, int end) {
  const TileLists& lists = p.scores.tiles;
  const i64 number = list_number(lists, batch_number, head);
  return count_tiles(lists.columns + (number * ceil_div(p.len_q, TILE_Q) + tile) * words_of(ceil_div(p.len_kv, TILE_KV)), first, end);
}

// In the backward a block goes through the query tiles of one head after the other, see QueryCursor, each head by its list, `list_of(head)`.
// The cursor moves on to the first listed tile from where it is, or behind all heads. `kept` are words of the list of its head.
template <typename ListOf> OP void find_listed(QueryCursor& now, int from, int to, int end_head, ListWords& kept, ListOf list_of) {
  #pragma unroll 1
  for (; now.head < end_head; ++now.head, now.tile = from) {
    const TileList list = list_of(now.head);
    now.tile = from < to ? list.next(now.tile, to + 1, kept) : list.previous(now.tile, to, kept);
    if (from < to ? now.tile <= to : now.tile >= to) return;
    kept.number = -1;
  }
}
template <typename ListOf> OP int count_listed(int first_head, int heads, int first, int end, ListOf list_of) {
  int count = 0;
  #pragma unroll 1
  for (int i = 0; i < heads; ++i) count += list_of(first_head + i).count(first, end);
  return count;
}

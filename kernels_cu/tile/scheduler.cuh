// scheduler.cuh -- which part of the problem a block works on.
#pragma once
#include "params.cuh"
#include "tile/mask.cuh"

template <bool, typename A, typename B> struct ChooseType { typedef A type; };
template <typename A, typename B> struct ChooseType<false, A, B> { typedef B type; };
template <bool FIRST, typename A, typename B> using Choose = typename ChooseType<FIRST, A, B>::type;

struct BlockCoord {
  int batch[BATCH_AXES];
  int head;
  int row;                                                    // first row
  u32 batch_number;                                           // number of the batch element
};

// the indices of a batch element from its number
OP void batch_element(int (&element)[BATCH_AXES], const int (&batch)[BATCH_AXES], u32 number) {
  #pragma unroll
  for (int i = BATCH_AXES - 1; i >= 0; --i) {
    element[i] = 0;
    if (batch[i] > 1) {                                       // divisions are slow, and most problems have one batch axis
      element[i] = int(number % batch[i]);
      number /= batch[i];
    }
  }
}

// Blocks in launch order: tiles of a head, heads, batch. Neighbours share K and V in the L2 cache. The last tile of a head comes
// first, because under a causal mask it is the longest and the short ones fill the gaps at the end.
OP BlockCoord block_coord(const int (&batch)[BATCH_AXES], int heads, int len_q, int tile_q, u32 block = block_id()) {
  const u32 tiles = ceil_div(len_q, tile_q);
  u32 rest = block;
  BlockCoord here;
  here.row = int(tiles - 1 - rest % tiles) * tile_q;
  rest /= tiles;
  here.head = int(rest % heads);
  rest /= heads;
  here.batch_number = rest;
  batch_element(here.batch, batch, rest);
  return here;
}

// The indices of a batch element where TMA is used, which tells two batch axes apart, the last ones; there seldom are two.
OP void batch_element(int (&element)[BATCH_AXES], u32 inner, u32 number) {
  const u32 outer = number < inner ? 0 : number / inner;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES - 2; ++i) element[i] = 0;
  element[BATCH_AXES - 2] = int(outer);
  element[BATCH_AXES - 1] = int(number - outer * inner);
}

// Query tiles by number, head after head, so that the blocks at work share keys and values in the L2 cache. Of a head the last tile comes
// first, then the first, the last but one, the second ...: under a causal mask two neighbours are as long together as any other two.
// STAGED_BIAS: two neighbours of one batch element, then the same of the next that shares its bias, so that these meet in the L2 cache.
OP BlockCoord tile_coord(const HopperForwardCommon& p, u32 number, int tile_q) {
  u32 element = 0;                                            // of those in turn
  if constexpr (STAGED_BIAS) {
    const u32 pair = number / 2, of_element = divide(pair, p.in_turn_divmod);
    element = pair - of_element * p.in_turn_divmod.divisor;
    number = of_element * 2 + number % 2;
  }
  const u32 head = divide(number, p.tiles_of_head_divmod), position = number - head * p.tiles_of_head_divmod.divisor;
  const u32 tile = position % 2 ? position / 2 : p.tiles_of_head_divmod.divisor - 1 - position / 2;
  BlockCoord here;
  here.row = int(tile) * tile_q;
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads);
  if constexpr (STAGED_BIAS) here.batch_number = here.batch_number * p.in_turn_divmod.divisor + element;
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

// A split of a query tile: those of its keys that one block computes.
struct SplitTile {
  u32 tile;                                                   // counted from the first that is split
  u32 number;                                                 // of the split: one more for the next split and for the next tile
  NBlockRange keys;                                           // tiles of them
};

// The key tiles of all split query tiles, one query tile's after the other's, are cut into equal runs, one for each block. A run is no longer
// than a query tile, so it is a split of one, or of two. Beyond these, a block finds splits without keys.
OP SplitTile split_of_block(const HopperForwardCommon& p, u32 index) {
  const u32 key_tiles = p.key_tiles_divmod.divisor, first = block_id() * p.key_tiles_per_block, end = min_of(first + p.key_tiles_per_block, p.split_tiles * key_tiles);
  const u32 tile = divide(first, p.key_tiles_divmod) + index - p.by_formula, start = tile * key_tiles;
  return {tile, tile + block_id(), {int(max_of(first, start) - start), int(min_of(end, start + key_tiles) - start)}};
}
// The splits of a query tile, first ... last.
struct SplitRange { u32 first, last; };
OP SplitRange splits_of_tile(const HopperForwardCommon& p, u32 tile) {
  const u32 key_tiles = p.key_tiles_divmod.divisor;
  return {tile + tile * key_tiles / p.key_tiles_per_block, tile + ((tile + 1) * key_tiles - 1) / p.key_tiles_per_block};
}

// Blocks of the backward own keys. Neighbours alternate among `together` heads: with few, they share q and dout in the L2 cache; with
// many, few of them add to the same rows of dq at a time. The first keys of a head come first: under a causal mask they are seen by
// the most queries, and blocks that add to dq in the order of keys then never wait for one that starts later.
struct KeyBlockCoord {
  int batch[BATCH_AXES];
  int head_kv;
  int first_head;                                             // of the query heads that the block sums over
  int tile;                                                   // of keys
  u32 batch_number;                                           // number of the batch element
};

OP KeyBlockCoord key_block_coord(const int (&batch)[BATCH_AXES], int heads, int heads_per_kv, int heads_per_block, int len_kv, int tile_kv,
                               u32 together) {
  const u32 units_of_batch = u32(heads) / heads_per_block;    // a unit is one share of one batch element
  u32 units = units_of_batch;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) units *= batch[i];
  const u32 tiles = ceil_div(len_kv, tile_kv);
  const u32 first_unit = block_id() / (together * tiles) * together, rest = block_id() - first_unit * tiles;
  together = min_of(together, units - first_unit);            // the last ones may be fewer
  KeyBlockCoord here;
  here.tile = int(rest / together);
  const u32 unit = first_unit + rest % together;
  here.first_head = int(unit % units_of_batch) * heads_per_block;
  here.head_kv = here.first_head / heads_per_kv;
  here.batch_number = unit / units_of_batch;
  batch_element(here.batch, batch, here.batch_number);
  return here;
}

// TILE_LIST: if there are `first_tiles`, so many blocks have the first keys of all units, and come before any others. Where all queries see these, but
// few of the others, a block that took them near the end would keep the whole device waiting.
template <typename Number> OP bool has_first_keys(const HopperBackwardParams& p, Number number) { return TILE_LIST && number() < p.first_tiles; }
template <typename Number> OP u32 number_of_others(const HopperBackwardParams& p, Number number) {
  return TILE_LIST && !has_first_keys(p, number) ? number() - p.first_tiles : number();
}

// The same with divisions by multiplication, which take a block less time, of key tile number number(), which is asked again and not kept. Packed keys are those of one batch element.
// Blocks of a cluster have one number, and as many batch elements that follow each other, of which units count the first.
template <typename Number> OP KeyBlockCoord key_block_coord(const HopperBackwardParams& p, bool packed, Number number) {
  u32 units = p.units_divmod.divisor;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) units *= packed ? 1 : p.batch[i];
  units /= CLUSTER;
  const u32 together = p.heads_together_divmod.divisor;
  const u32 group = divide(number_of_others(p, number), p.group_divmod), first_unit = group * together, rest = number_of_others(p, number) - group * p.group_divmod.divisor;
  const u32 here_together = min_of(together, units - first_unit);
  KeyBlockCoord here;
  here.tile = int(here_together == together ? divide(rest, p.heads_together_divmod) : rest / here_together);
  u32 unit = first_unit + rest - here.tile * here_together;
  if constexpr (TILE_LIST) {
    if (has_first_keys(p, number)) here.tile = 0, unit = number();
    else if (p.first_tiles) ++here.tile;
  }
  here.batch_number = divide(unit, p.units_divmod);
  here.first_head = int(unit - here.batch_number * p.units_divmod.divisor) * p.heads_per_block;
  if constexpr (CLUSTER > 1) here.batch_number = here.batch_number * CLUSTER + block_id() % CLUSTER;
  here.head_kv = int(divide(here.first_head, p.heads_per_kv_divmod));
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

// The query tiles of a block: those of its first head, then those of the next, from one end to the other.
struct QueryCursor {
  int head, tile;
  OP void advance(int from, int to) {
    if (tile != to) {
      tile += from < to ? 1 : -1;
      return;
    }
    tile = from;
    ++head;
  }
};

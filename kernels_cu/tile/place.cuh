// place.cuh -- which part of the problem a block works on.
#pragma once
#include "params.cuh"
#include "tile/mask.cuh"

template <bool, typename A, typename B> struct ChooseType { typedef A type; };
template <typename A, typename B> struct ChooseType<false, A, B> { typedef B type; };
template <bool FIRST, typename A, typename B> using Choose = typename ChooseType<FIRST, A, B>::type;

struct Place {
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
OP Place place_of_block(const int (&batch)[BATCH_AXES], int heads, int len_q, int tile_q, u32 block = block_id()) {
  const u32 tiles = ceil_div(len_q, tile_q);
  u32 rest = block;
  Place here;
  here.row = int(tiles - 1 - rest % tiles) * tile_q;
  rest /= tiles;
  here.head = int(rest % heads);
  rest /= heads;
  here.batch_number = rest;
  batch_element(here.batch, batch, rest);
  return here;
}

// The indices of a batch element where the copy engine is used, which tells two batch axes apart, the last ones; there seldom are two.
OP void batch_element(int (&element)[BATCH_AXES], u32 inner, u32 number) {
  const u32 outer = number < inner ? 0 : number / inner;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES - 2; ++i) element[i] = 0;
  element[BATCH_AXES - 2] = int(outer);
  element[BATCH_AXES - 1] = int(number - outer * inner);
}

// Query tiles by number, head after head, so that the blocks at work share keys and values in the L2 cache. Of a head the last tile comes
// first, then the first, the last but one, the second ...: under a causal mask two neighbours are as long together as any other two.
OP Place place_of_tile(const HopperForwardParams& p, u32 number, int tile_q) {
  const u32 head = divide(number, p.by_tiles_of_head), place = number - head * p.by_tiles_of_head.divisor;
  const u32 tile = place % 2 ? place / 2 : p.by_tiles_of_head.divisor - 1 - place / 2;
  Place here;
  here.row = int(tile) * tile_q;
  here.batch_number = divide(head, p.by_heads);
  here.head = int(head - here.batch_number * p.heads);
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

// A part of a query tile: some of its keys, as a block computes them whose share of the shared tiles they are.
struct TilePart {
  u32 tile;                                                   // counted from the first shared one
  u32 number;                                                 // of the part: one more for the next part and for the next tile
  TileRange keys;                                             // tiles of them
};

// The key tiles of all shared query tiles in a row are cut into equal shares, one for each block. A share is no longer than a query tile, so
// it is a part of one, or of two. Beyond its parts a block has some without keys.
OP TilePart part_in_turn(const HopperForwardParams& p, u32 turn) {
  const u32 key_tiles = p.by_key_tiles.divisor, first = block_id() * p.share, end = min_of(first + p.share, p.shared_tiles * key_tiles);
  const u32 tile = divide(first, p.by_key_tiles) + turn - p.by_formula, start = tile * key_tiles;
  return {tile, tile + block_id(), {int(max_of(first, start) - start), int(min_of(end, start + key_tiles) - start)}};
}
// The parts of a shared tile, first ... last.
struct TileParts { u32 first, last; };
OP TileParts parts_of_tile(const HopperForwardParams& p, u32 tile) {
  const u32 key_tiles = p.by_key_tiles.divisor;
  return {tile + tile * key_tiles / p.share, tile + ((tile + 1) * key_tiles - 1) / p.share};
}

// What a block does in a turn: it computes a query tile, or a part of one.
struct Turn : Place {
  TilePart part;                                              // if there is one
};
OP bool is_part(const HopperForwardParams& p, u32 turn) { return SPLIT_KV && turn >= u32(p.by_formula); }

// The number of the tile that a block takes in a turn, and whether there is one. A formula keeps the blocks at work on the same heads. At
// the end it would leave some of them with a tile more, so there the planner deals the tiles out, see schedule.py, or all blocks share them.
OP u32 in_turn(const HopperForwardParams& p, u32 turn) {
  if (!SPLIT_KV && turn >= u32(p.by_formula)) return p.by_formula * blocks() + p.table[block_id()][turn - p.by_formula];
  return p.run == 2 ? (turn / 2 * blocks() + block_id()) * 2 + turn % 2 : turn * blocks() + block_id();
}
OP bool has_turn(const HopperForwardParams& p, u32 turn) {
  if (is_part(p, turn)) {
    const TileRange keys = part_in_turn(p, turn).keys;
    return keys.begin < keys.end;
  }
  if (turn >= u32(p.by_formula)) return p.table[block_id()][turn - p.by_formula] != NO_TILE;
  return in_turn(p, turn) < u32(p.tiles);
}
OP Turn place_in_turn(const HopperForwardParams& p, u32 turn, int tile_q) {
  Turn here;
  if (is_part(p, turn)) here.part = part_in_turn(p, turn);
  static_cast<Place&>(here) = place_of_tile(p, is_part(p, turn) ? p.first_shared + here.part.tile : in_turn(p, turn), tile_q);
  return here;
}

// Blocks of the backward own keys. Neighbours take turns among `together` heads: with few, they share q and dout in the L2 cache; with
// many, few of them add to the same rows of dq at a time. The first keys of a head come first: under a causal mask they are seen by
// the most queries, and blocks that add to dq in the order of keys then never wait for one that starts later.
struct KeyPlace {
  int batch[BATCH_AXES];
  int head_kv;
  int first_head;                                             // of the query heads that the block sums over
  int tile;                                                   // of keys
  u32 batch_number;                                           // number of the batch element
};

OP KeyPlace key_place_of_block(const int (&batch)[BATCH_AXES], int heads, int heads_per_kv, int heads_per_block, int len_kv, int tile_kv,
                               u32 together) {
  const u32 shares = u32(heads) / heads_per_block;            // a unit is one share of one batch element
  u32 units = shares;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) units *= batch[i];
  const u32 tiles = ceil_div(len_kv, tile_kv);
  const u32 first_unit = block_id() / (together * tiles) * together, rest = block_id() - first_unit * tiles;
  together = min_of(together, units - first_unit);            // the last ones may be fewer
  KeyPlace here;
  here.tile = int(rest / together);
  const u32 unit = first_unit + rest % together;
  here.first_head = int(unit % shares) * heads_per_block;
  here.head_kv = here.first_head / heads_per_kv;
  here.batch_number = unit / shares;
  batch_element(here.batch, batch, here.batch_number);
  return here;
}

// The same with divisions by multiplication, which take a block less time.
OP KeyPlace key_place_of_block(const HopperBackwardParams& p, int tile_kv) {
  u32 units = p.by_shares.divisor;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) units *= p.batch[i];
  const u32 together = p.by_together.divisor;
  const u32 group = divide(block_id(), p.by_group), first_unit = group * together, rest = block_id() - group * p.by_group.divisor;
  const u32 here_together = min_of(together, units - first_unit);
  KeyPlace here;
  here.tile = int(here_together == together ? divide(rest, p.by_together) : rest / here_together);
  const u32 unit = first_unit + rest - here.tile * here_together;
  here.batch_number = divide(unit, p.by_shares);
  here.first_head = int(unit - here.batch_number * p.by_shares.divisor) * p.heads_per_block;
  here.head_kv = int(divide(here.first_head, p.by_heads_per_kv));
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

// own_tiles.cuh -- sequences of their own lengths in fwd_hopper.cu (VARLEN): where a query tile is, by its number among all of them, and which tile, or
// split of one, is a block's own where there are hardly more than blocks run at once (UNLISTED). Then nobody has to put them in order, which would
// take a launch before.
#pragma once
#include "tile/key_splits.cuh"
#include "tile/schedule.cuh"
#include "tile/scheduler.cuh"

// SPLIT_KV: all query tiles are counted, also of rows that a sequence has not. Queries are not packed there.
OP BlockCoord split_tile_coord(const HopperVarlenParams& p, u32 tile) {
  const u32 head = divide(tile, p.tiles_of_head_divmod);
  BlockCoord here;
  here.row = int(tile - head * p.tiles_of_head_divmod.divisor) * TILE_Q;
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads);
  batch_element(here.batch, p.batch[BATCH_AXES - 1], here.batch_number);
  return here;
}

// A query tile of a sequence, and its splits.
template <typename Params> struct TileOfSequence {
  BlockCoord here;
  Sequence<Params> seq;
  KeySplits splits;
};
template <typename Params> OP TileOfSequence<Params> tile_of_sequence(const Params& p, u32 number) {
  const BlockCoord here = split_tile_coord(p, number);
  const auto seq = sequence_of(p, here.batch_number);
  const ColumnRange visible = visible_keys(Mask{seq.mask(), seq.kv.len()}, here.row, min_of(TILE_Q, p.len_q - here.row));
  return {here, seq, splits_of_keys(p, p.most_splits, seq.kv.len(), visible)};
}

// UNLISTED: what a block computes, and of a query tile that is split, which split; WHOLE if it is the only one. Of a head the last tiles come first, which
// under a causal mask are the longest.
template <typename Params> struct OwnTile {
  TileOfSequence<Params> tile;
  int split;
  OP bool exists() const { return tile.here.row >= 0 && tile.here.row < tile.seq.q.len() && tile.splits.first <= split && split <= tile.splits.last; }
  OP u32 number() const { return tile.splits.is_one() ? WHOLE : u32(split); }
};
template <typename Params> OP OwnTile<Params> own_tile(const Params& p) {
  if constexpr (SPLIT_KV) {
    const u32 tile = block_id() / p.most_splits;
    return {tile_of_sequence(p, tile), int(block_id() - tile * p.most_splits)};
  } else {
    const BlockCoord here = block_coord<QUERIES>(p, p.heads);
    return {{here, sequence_of(p, here.batch_number), {}}, 0};
  }
}

// key_splits.cuh -- how the keys of a query tile are dealt out to blocks (SPLIT_KV) where what a block computes follows from one sequence alone: in fwd_v2, and
// with sequences of their own lengths in fwd_hopper.
//
// Splits are about equally long, and how long follows from the length of the sequence alone: combined in their order, they have the same bits
// whatever else is in the batch, and whoever combines them. What no row of the tile sees is no split; a tile with one split needs no combining.
#pragma once
#include "tile/mask.cuh"

// The splits first ... last of a query tile, of so many keys each.
struct KeySplits {
  int keys, first, last;
  OP int count() const { return last - first + 1; }
  OP bool is_one() const { return first == last; }
};
// Keys of each split of a sequence, of which there are at most so many: whole tiles.
template <typename Params> OP u32 keys_of_split(const Params& p, u32 most, int len_kv) {
  const u32 splits = min_of(max_of(divide(u32(len_kv), p.split_keys_divmod), 1u), most);
  return max_of((u32(len_kv) + splits - 1) / splits + TILE_KV - 1, u32(TILE_KV)) / TILE_KV * TILE_KV;
}
template <typename Params> OP KeySplits splits_of_keys(const Params& p, u32 most, int len_kv, const ColumnRange& visible) {
  const u32 keys = keys_of_split(p, most, len_kv);
  if (visible.last < visible.first) return {int(keys), 0, 0};
  return {int(keys), int(visible.first / keys), int(visible.last / keys)};
}

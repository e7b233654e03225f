// classify.cu -- in which tiles of pairs any takes part, and in which all do, from the same expression and the same array as in attention:
//
//   classify            one block for 32 tiles of a list, and one warp for each tile, by intervals or by its pairs:
//     any = whether a pair takes part that MaskParams shows
//     all = whether every pair takes part
//                       PAIR_BITS: all warps share the pairs of tiles of which intervals do not tell, 16 rows each, and leave them as bits
//
//   classify_columns    where lists are by keys and blocks add in order: for each query tile the key tiles that see it, the same bits in columns
#include "config.cuh"
#include "params.cuh"
#include "tile/classification.cuh"
#include "tile/scheduler.cuh"

constexpr int MOST_PARTS = 16;                                // 16 rows each, of a tile
constexpr int SHARED_BYTES = 32 * (1 + PAIR_BITS * MOST_PARTS) * int(sizeof(u32));   // what was found of each tile, and then of the parts of each

KERNEL(32 * WARPS, MIN_BLOCKS) classify(GRID_CONSTANT ClassifyParams p) {
  const u32 list = divide(block_id(), p.words_divmod), words = p.words_divmod.divisor, word = block_id() - list * words;
  const u32 head = divide(list, p.tiles_divmod), tile = list - head * p.tiles_divmod.divisor;
  BlockCoord here{};
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads_divmod.divisor);
  batch_element(here.batch, p.batch, here.batch_number);
  const ScoreContext x = score_context(p, here, here.head);
  const Mask mask{p.mask, p.len_kv};
  const SharedAddress found_smem = shared_memory();
  #pragma unroll 1
  for (int i = warp_id(); i < 32; i += WARPS) {
    const int other = int(word) * 32 + i, query_tile = p.by_keys ? other : int(tile), key_tile = p.by_keys ? int(tile) : other;
    const auto find = [&](int row0, int col0) { return PAIR_BITS ? classify_by_intervals(p, x, mask, row0, col0) : classify_tile(p, x, mask, row0, col0); };
    store_once(found_smem + i * int(sizeof(u32)), other < p.others ? find(query_tile * p.tile_q, key_tile * p.tile_kv) : u32(MASKED));
  }
  sync_block();                                               // without it bits are made of what has not been found yet
  const int parts = PAIR_BITS ? (p.by_keys ? p.tile_kv : p.tile_q) / 16 : 0;
  if constexpr (PAIR_BITS) {
    #pragma unroll 1
    for (int i = warp_id(); i < 32 * parts; i += WARPS) {     // those of a tile one after the other would be the same warp's
      const int other = int(word) * 32 + i % 32, row0 = int(tile) * parts * 16 + i / 32 * 16;
      if (!(uniform(load_shared<u32>(found_smem + i % 32 * int(sizeof(u32)))) & UNKNOWN)) continue;
      u32 found = NO_PAIR;
      if (row0 < (p.by_keys ? p.len_kv : p.len_q)) {
        char* const to = pair_words(p.scores.tiles.lists, words_of_lists(p.scores.tiles, p.tiles_divmod.divisor, p.others));
        found = p.by_keys ? classify_pairs<true>(p, x, mask, to, row0, other) : classify_pairs<false>(p, x, mask, to, row0, other);
      }
      store_once(found_smem + (32 + i) * int(sizeof(u32)), found);
    }
    sync_block();                                             // the same
  }
  if (warp_id() > 0) return;
  u32* const any_row = p.scores.tiles.lists + i64(list) * 2 * words + word;
  write_words(any_row, any_row + words, found_smem, parts);
}

// One block for each query tile, and one warp for 32 key tiles at a time.
KERNEL(32 * WARPS, 1) classify_columns(GRID_CONSTANT ClassifyParams p) {
  const int query_tiles = p.others, key_tiles = p.tiles_divmod.divisor, words = p.words_divmod.divisor;
  const u32 head = block_id() / query_tiles;
  const int tile = int(block_id() - head * query_tiles);
  const u32* const lists = p.scores.tiles.lists + i64(head) * key_tiles * 2 * words;
  u32* const column = p.scores.tiles.columns + i64(block_id()) * words_of(key_tiles);
  #pragma unroll 1
  for (int word = warp_id(); word < words_of(key_tiles); word += WARPS)
    write_column(column + word, lists, words, tile / 32, tile % 32, word * 32, key_tiles);
}

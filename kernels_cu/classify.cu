// classify.cu -- in which tiles of pairs any takes part, and in which all do, from the same expression and the same array as in attention:
//
//   classify            one block for 8 tiles of a list, and one warp for each, by intervals or by its pairs:
//     any = whether a pair takes part that MaskParams shows
//     all = whether every pair takes part
//                       PAIR_BITS: the warps share the pairs of tiles of which intervals do not tell, 16 rows each, and leave them as bits; a pair
//                       that MaskParams hides, or that does not exist, takes no part then
//
//   classify_columns    where lists are by keys and blocks add in order: for each query tile the key tiles that see it, the same bits in columns
#include "config.cuh"
#include "params.cuh"
#include "tile/classification.cuh"
#include "tile/scheduler.cuh"

constexpr int MOST_PARTS = 16;                                // 16 rows each, of a tile
constexpr int SHARED_BYTES = TILES * (1 + PAIR_BITS * MOST_PARTS) * int(sizeof(u32));    // what was found of each tile, and then of the parts of each
static_assert(WARPS == TILES, "each warp has a tile");

KERNEL(32 * WARPS, MIN_BLOCKS) classify(GRID_CONSTANT ClassifyParams p) {
  const u32 row = divide(block_id() / BYTES, p.words_divmod), words = p.words_divmod.divisor, byte = block_id() - row * words * BYTES;
  const u32 head = divide(row, p.tiles_divmod), tile = row - head * p.tiles_divmod.divisor;
  BlockCoord here{};
  here.batch_number = divide(head, p.heads_divmod);
  here.head = int(head - here.batch_number * p.heads_divmod.divisor);
  batch_element(here.batch, p.batch, here.batch_number);
  const ScoreContext x = score_context(p, here, here.head);
  const Mask mask{p.mask, p.len_kv};
  const SharedAddress found_smem = shared_memory();
  const int first = int(byte) * TILES, other = first + warp_id(), query_tile = p.by_keys ? other : int(tile), key_tile = p.by_keys ? int(tile) : other;
  const auto find = [&](int row0, int col0) { return PAIR_BITS ? classify_by_intervals(p, x, mask, row0, col0) : classify_tile(p, x, mask, row0, col0); };
  store_once(found_smem + warp_id() * int(sizeof(u32)), other < p.others ? find(query_tile * p.tile_q, key_tile * p.tile_kv) : u32(MASKED));
  sync_block();                                               // without it bits are made of what has not been found yet
  const int parts = PAIR_BITS ? (p.by_keys ? p.tile_kv : p.tile_q) / 16 : 0;
  if constexpr (PAIR_BITS) {
    char* const pairs = pair_words(p.scores.tiles.lists, words_of_lists(p.scores.tiles, p.tiles_divmod.divisor, p.others));
    int before = 0;                                           // parts of tiles before, which warps take in turn
    #pragma unroll 1
    for (u32 rest = unknown_tiles(found_smem); rest; rest &= rest - 1, before += parts) {
      const int i = lowest_bit(rest);
      #pragma unroll 1
      for (int part = (warp_id() + WARPS - before % WARPS) % WARPS; part < parts; part += WARPS) {
        const int row0 = (int(tile) * parts + part) * 16;
        const u32 found = p.by_keys ? classify_pairs<true>(p, x, mask, pairs, row0, first + i) : classify_pairs<false>(p, x, mask, pairs, row0, first + i);
        store_once(found_smem + (TILES * (1 + part) + i) * int(sizeof(u32)), found);
      }
    }
    sync_block();                                             // the same
  }
  if (warp_id() > 0) return;
  u32* const any_row = p.scores.tiles.lists + i64(row) * 2 * words;
  write_bytes(reinterpret_cast<unsigned char*>(any_row) + byte, reinterpret_cast<unsigned char*>(any_row + words) + byte, found_smem, parts);
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

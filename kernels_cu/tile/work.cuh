// work.cuh -- what the producer of fwd_hopper.cu tells a consumer warpgroup with its queries: where they are, and which key tiles they need.
#pragma once
#include "tile/scheduler.cuh"
#include "tile/tile_list.cuh"

constexpr int GROUPS = WARPS / 4 - 1;                         // consumer warpgroups
constexpr int ROWS = TILE_Q / GROUPS;                         // of Q, for each of them
constexpr bool AHEAD = STAGES_Q > GROUPS;                     // a query tile begins before the one before it has ended

// What the producer tells a consumer with its queries. It has the time to work that out; a consumer between two tiles keeps tensor cores waiting.
enum Next { NOTHING, LATER, DIRECTLY };                       // DIRECTLY: the next tile begins beneath the last product of this one
constexpr u32 WHOLE = ~u32(0);
struct alignas(16) WorkDescriptor {
  int batch[2], head, row;                                    // where the block's query tile begins; the last two batch axes, the others are 0
  int first, last;                                            // key tiles that the consumer needs
  int before, beyond;                                         // how many its block needs before and beyond those
  int next;                                                   // whether and when another one follows
  u32 split;                                                  // number of the split of a query tile, or WHOLE
};
// The work of a consumer in a query tile that it begins beneath the end of one of whose key tiles it leaves so many unread (`left`).
OP WorkDescriptor describe_work(const HopperForwardParams& p, const Mask& mask, u32 index, const WorkTile& here, const NBlockRange& tiles, const TileList& list, int group, int left, bool follows) {
  WorkDescriptor work;
  #pragma unroll
  for (int i = 0; i < 2; ++i) work.batch[i] = here.batch[BATCH_AXES - 2 + i];
  work.head = here.head;
  work.row = here.row;
  const int row = here.row + group * ROWS;
  const NBlockRange seen = n_block_range(mask, row, min_of(ROWS, p.len_q - row), TILE_KV, tiles), own = SPLIT_KV ? clip_range(tiles, seen) : seen;
  // Tiles are split only where all rows see the first keys. With more tiles before, the producer would wait for stages of V that a consumer
  // has not come to, and the consumer for keys; or, with ping-pong, for other consumers, which wait for the producer.
  work.before = SPLIT_KV ? 0 : min_of(own.begin - tiles.begin, max_of(STAGES_V - 1 - left, 0));
  work.first = tiles.begin + work.before;
  work.last = own.end - 1;
  work.beyond = tiles.end - own.end;
  if constexpr (TILE_LIST) {                                  // all consumers need the tiles of one list, and count them
    work.first = work.before = work.beyond = 0;
    work.last = max_of(list.count(tiles.begin, tiles.end), 1) - 1;
  }
  // With more tiles beyond, the producer would wait for their stages to be released before it brings the next queries.
  const bool few = work.beyond < min_of(STAGES, STAGES_V);
  work.next = !follows ? NOTHING : AHEAD && few && !is_split(p, index + 1) ? DIRECTLY : LATER;
  work.split = is_split(p, index) ? here.split.number : WHOLE;
  return work;
}

// work.cuh -- what a block of fwd_hopper.cu computes next, and what its producer tells a consumer warpgroup with its queries: where they are, and
// which key tiles they need.
#pragma once
#include "tile/accum.cuh"
#include "tile/listed_work.cuh"
#include "tile/own_tiles.cuh"
#include "tile/scheduler.cuh"

constexpr int GROUPS = WARPS / 4 - 1;                         // consumer warpgroups
constexpr int ROWS = TILE_Q / GROUPS;                         // of Q, for each of them
static_assert(ROWS == 64, "a warpgroup owns 64 query rows");
constexpr bool AHEAD = STAGES_Q > GROUPS && !UNLISTED;        // a query tile begins before the one before it has ended; where each block has one there is none
static_assert(STAGES_Q >= GROUPS, "each warpgroup reads a stage");
constexpr int EARLY = min_of(STAGES_Q - GROUPS, GROUPS);      // warpgroups whose next queries need not wait until others have read theirs
constexpr int LEAD = TILE_LIST || FROM_LAST ? 0 : (GROUPS - 1) * ROWS / TILE_KV; // key tiles: under a mask, so many may be left when the first consumer ends its query tile
constexpr bool SHARED_STAGES = STAGES_Q % GROUPS != 0;        // by several consumers, so that each has to wait for every filling of a stage
static_assert(min_of(STAGES, STAGES_V) <= 16 && GROUPS <= 8, "four bits for each consumer hold how many key tiles it may leave");
static_assert(GROUPS > 1 || !PINGPONG, "ping-pong takes two warpgroups");
constexpr bool FOUR_CAPPED = EXPLICIT_SCORES && SCORES == UNCHANGED && GROUPS == 4; // a softcap

// Of the registers that a launch deals out evenly, the producer gives back most.
constexpr int THREADS = 32 * WARPS;
constexpr int REGISTERS = 65536 / (THREADS * MIN_BLOCKS) / 8 * 8;
constexpr bool PRODUCER_KEEPS_MUCH = ((PAGED || CACHED || (VARLEN && SPLIT_KV) || UNLISTED || (STAGED_BIAS && (VARLEN || TILE_LIST))) && GROUPS == 2) || (TILE_LIST && GROUPS == 1);
constexpr bool PRODUCER_KEEPS_MORE = COPIED_PAGES || GROUPS == 3 || UNLISTED || (VARLEN && (SCORES == PLUS_LINEAR || DROPOUT || (FP16_PARTS && WIDTH > 64))) || (FLOAT32_RESULTS && WIDTH > 192);
constexpr int PRODUCER_REGISTERS = VARLEN && GROUPS == 1 ? 56 : PRODUCER_KEEPS_MUCH ? 40 : PRODUCER_KEEPS_MORE ? 32 : 24;
constexpr int CONSUMER_REGISTERS = min_of((REGISTERS * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8, 240);

using WorkParams = Choose<VARLEN, HopperVarlenParams, HopperForwardParams>;

// Where a query tile is, or the keys of one; VARLEN: and where its sequence lies. `row` counts from the first query of the sequence.
struct SequenceCoord : BlockCoord {
  SequenceRows q, kv;
};
using TileCoord = Choose<VARLEN, SequenceCoord, BlockCoord>;
// the rows of its sequence, or without VARLEN what the kernel was told
template <Side SIDE, typename Params, typename Coord> OP Rows<SIDE, Params> rows_at(const Params& p, const Coord& here) {
  if constexpr (!VARLEN) return {p, here.batch_number};
  else if constexpr (SIDE == QUERIES) return here.q;
  else return here.kv;
}
// and its mask, from here on
template <typename Params, typename Coord> OP void move_mask(Mask& mask, const Params& p, const Coord& here) {
  if constexpr (VARLEN) {
    mask = {mask_of_sequence(p, here.q.count, here.kv.count), here.kv.count};
  }
}

// VARLEN: under a causal mask the last queries of a sequence see most keys. So it is the first query tile that is not full, whose rows see few; others
// begin at multiples of 64 queries all the same. Where a term or a mask asks how many queries there are, tiles lie as they are counted, and so where heads
// share them, or blocks.
constexpr bool LAST_IS_FULL = VARLEN && SCORES == UNCHANGED && !MASKED_PAIRS && !PACK_GQA && !SPLIT_KV;
// Moves a tile there, and counts its sequence's queries up to its end.
template <typename Coord> OP void fill_last_tile(Coord& here) {
  if constexpr (LAST_IS_FULL) {
    const int queries = here.q.count, left = ceil_div(queries, TILE_Q) * TILE_Q - ceil_div(queries, ROWS) * ROWS;
    here.q.count = min_of(here.row + TILE_Q - left, queries);
    here.row = max_of(here.row - left, 0);
  }
}

// Rows that are no queries have no say in how a step is done. They are zeros, so that their scores are, or (and where something is added to a score) each
// step leaves out what they sum up, which takes as many instructions of few keys as of many.
constexpr bool CLEARS_QUERIES = LAST_IS_FULL && GROUPS == 4 && PINGPONG && MASK == BAND && !DROPOUT;

// What a block computes at a time: a query tile, or a split of one.
struct WorkTile : TileCoord {
  SplitTile split;                                            // if there is one
};
OP bool is_split(const HopperForwardParams& p, u32 index) { return SPLIT_KV && index >= u32(p.by_formula); }
OP bool is_split(const HopperForwardParams& p, u32 index, const WorkTile&) { return is_split(p, index); }
OP bool is_split(const HopperVarlenParams&, u32, const WorkTile& here) { return SPLIT_KV && here.split.number != WHOLE; }
constexpr bool ENDS_SPLITS = VARLEN && SPLIT_KV;              // the next tile begins beneath the end of a split as well. Without VARLEN a block has two at most

// A result from a row of the sequence on.
template <typename T, typename Params, typename Coord> OP TileOf<T, INNER_HEADS> results_from(const Tensor& t, const Params& p, const Coord& here, int row, int cols) {
  const auto q = rows_at<QUERIES>(p, here);
  if constexpr (FP16_PARTS > 0 && COPY_BYTES == 0) return slice<T>(t, here.batch, here.head, q.first() + row, q.end(), cols); // elements of a row may be apart
  else if constexpr (INNER_HEADS == 1) return rows_of<T>(t, here.batch, here.head, q.first() + row, q.end(), cols);
  else return {static_cast<T*>(t.data) + offset_of(t, here.batch, here.head * INNER_HEADS, (q.first() + row) / INNER_HEADS), t.row_stride, t.head_stride, 1, q.len() - row, cols};
}
// Out, and its log-sum-exp, of rows that are queries, or heads.
template <typename Params, typename Coord> OP TileOf<Result, INNER_HEADS> out_rows(const Params& p, const Coord& here, int row) {
  return results_from<Result>(p.out, p, here, row, p.dim_v);
}
template <typename Params, typename Coord> OP float* lse_rows(const Params& p, const Coord& here, int row) {
  return row_slice(p.lse, here.batch, here.head, rows_at<QUERIES>(p, here).first() + row);
}
template <typename Params, typename Coord> OP TileOf<float, INNER_HEADS> lse_of_heads(const Params& p, const Coord& here, int row) {
  return results_from<float>(p.lse, p, here, row, 1);
}
// Queries from a row of the array on are on their way to the stage at hand. INNER_HEADS: rows of the map are heads, of one box so many, and its heads
// are queries.
template <typename Stages, typename Coord> OP void load_rows(Stages& queries, const TensorMap& map, const Coord& here, int row, CallSite at = call_site()) {
  if constexpr (INNER_HEADS == 1) {
    load_async(queries, map, here.batch, here.head, row, at);
  } else {
    const int of_group[BATCH_AXES] = {0, 0, here.batch[BATCH_AXES - 1], here.head};
    load_async(queries, map, of_group, row / INNER_HEADS, 0, at);
  }
}

// The number of the query tile that is a block's next one, after `index` others, and whether there is one. A formula keeps the blocks at work
// on the same heads. At the end it would leave some of them with a tile more, so there the planner deals the tiles out, see schedule.py, or
// they are split.
OP u32 work_tile_number(const HopperForwardParams& p, u32 index) {
  if (!SPLIT_KV && index >= u32(p.by_formula)) return p.by_formula * blocks() + p.table[block_id()][index - p.by_formula];
  return p.run == 2 ? (index / 2 * blocks() + block_id()) * 2 + index % 2 : index * blocks() + block_id();
}
constexpr bool TAKES_TILES = VARLEN || IN_TURN;               // blocks take query tiles from a list, and `index` is the number of one there
static_assert(!IN_TURN || (TILE_LIST && !SPLIT_KV), "whole query tiles, of which a list says how long they are");
OP bool has_work_tile(const HopperForwardParams& p, u32 index) {
  if (IN_TURN) return index < u32(p.tiles);
  if (is_split(p, index)) {
    const NBlockRange keys = split_of_block(p, index).keys;
    return keys.begin < keys.end;
  }
  if (index >= u32(p.by_formula)) return p.table[block_id()][index - p.by_formula] != NO_TILE;
  return work_tile_number(p, index) < u32(p.tiles);
}
OP WorkTile work_tile_coord(const HopperForwardParams& p, u32 index, int tile_q) {
  WorkTile here;
  if constexpr (IN_TURN) {
    static_cast<BlockCoord&>(here) = listed_tile_coord(p, index);
    return here;
  }
  if (is_split(p, index)) here.split = split_of_block(p, index);
  static_cast<BlockCoord&>(here) = tile_coord(p, is_split(p, index) ? p.first_split_tile + here.split.tile : work_tile_number(p, index), tile_q);
  return here;
}

// TILE_LIST: whether consumers may be told of the next query tile now, with so many key tiles `left` of the one at hand, or only when few are. With it
// the block takes the number of one more (IN_TURN). Of the last tiles others would begin that one sooner, so there it waits.
constexpr u32 LAST_TILES = 4;                                 // of each block
constexpr int FEW_LEFT = 8;
template <typename Params> OP bool announces_early(const Params& p, u32 index, int left) {
  if constexpr (IN_TURN) return left <= FEW_LEFT || index + LAST_TILES * blocks() < u32(p.tiles);
  else return true;
}

// VARLEN: query tiles come from a list with the longest first. A few heads take turns with it, whose keys and values stay in the L2 cache meanwhile;
// then the next ones do. A block begins with the tile of its own number, and takes one more whenever it begins one: who had longer ones takes
// fewer. So the number of a tile stands in place of `index` here.
OP bool has_work_tile(const HopperVarlenParams& p, u32 number) {
  if constexpr (UNLISTED) return number == block_id();
  count_read(sizeof(WorkItem));
  return number < u32(p.work[0].row) * p.heads;
}
template <typename Params> OP u32 take_work_tile(const Params& p) {
  if constexpr (UNLISTED) return blocks();
  else return blocks() + count_up(&p.work[0].taken);
}
// The same by one of the warps that load, for all of them.
template <typename Params> OP u32 take_work_tile(const Params& p, int warp, SharedAddress taken_smem, int barrier) {
  if (PRODUCER_WARPS == 1 || UNLISTED) return take_work_tile(p);
  sync_first<PRODUCER_WARPS>(barrier);                        // without it a number is overwritten that a slower warp has not read
  if (warp == 0) store_once(taken_smem, take_work_tile(p));
  sync_first<PRODUCER_WARPS>(barrier);                        // without it a number is read that has not been taken
  return uniform(load_shared<u32>(taken_smem));
}
struct ListedCoord : SequenceCoord {
  u32 split;                                                  // SPLIT_KV: which one of the query tile, or WHOLE
};
OP ListedCoord sequence_tile_coord(const HopperVarlenParams& p, u32 number, u32 tiles) { // of so many in the list
  const u32 together = p.heads_together_divmod.divisor, group = number / (together * tiles), of_group = number - group * together * tiles;
  const u32 tile = divide(of_group, p.heads_together_divmod);
  count_read(sizeof(PlacedWorkItem));
  const PlacedWorkItem item = p.work[1 + tile];
  ListedCoord here;
  here.split = item.taken;
  here.head = int(group * together + of_group - tile * together);
  here.row = item.row;
  here.batch_number = u32(item.sequence);
  batch_element(here.batch, p.batch, here.batch_number);
  here.q = {item.begin_q, item.len_q, item.room_q, 0, 0};
  here.kv = {item.begin_kv, item.len_kv, item.len_kv, 0, 0};
  return here;
}
// The same of tiles that have queries; UNLISTED: of the block's own.
template <typename Params> OP ListedCoord listed_coord(const Params& p, u32 number) {
  if constexpr (UNLISTED) {
    const auto own = own_tile(p);
    const auto& seq = own.tile.seq;
    return {{own.tile.here, {seq.q.begin, seq.q.count, seq.q.room, 0, 0}, {seq.kv.begin, seq.kv.count, seq.kv.count, 0, 0}}, own.number()};
  } else {
    return sequence_tile_coord(p, number, u32(p.work[0].row));
  }
}
// Which keys a split has, and its number among those of all query tiles.
OP SplitTile split_of_sequence(const HopperVarlenParams& p, const SequenceCoord& here, u32 split) {
  const int tiles = int(keys_of_split(p, p.most_splits, here.kv.count)) / TILE_KV;
  const u32 tile = (here.batch_number * p.heads + here.head) * p.tiles_of_head_divmod.divisor + here.row / TILE_Q;
  return {tile, split == WHOLE ? WHOLE : tile * p.most_splits + split, {int(split) * tiles, (int(split) + 1) * tiles}};
}
OP WorkTile work_tile_coord(const HopperVarlenParams& p, u32 number, int) {
  WorkTile here{};
  const ListedCoord listed = listed_coord(p, number);
  static_cast<TileCoord&>(here) = listed;
  if constexpr (SPLIT_KV) here.split = split_of_sequence(p, listed, listed.split);
  return here;
}

// VARLEN: results of rows that are no queries, which consumers do not write, by warps that have nothing else to do: `warp` of so many in a block.
template <typename Params> OP void clear_rooms(const Params& p, int warp, int warps) {
  if (SPLIT_KV) return;                                       // planned where all rows are queries
  const u32 tiles = UNLISTED ? 0 : u32(p.work[0].sequence), end = UNLISTED ? INNER_HEADS : tiles * p.heads * INNER_HEADS;
  #pragma unroll 1
  for (u32 number = UNLISTED ? warp : block_id() * warps + warp; number < end; number += UNLISTED ? warps : blocks() * warps) {
    const SequenceCoord here = UNLISTED ? listed_coord(p, 0) : sequence_tile_coord(p, number / INNER_HEADS, tiles);
    const int head = here.head * INNER_HEADS + int(number % INNER_HEADS);
    const int first = max_of(here.row, here.q.count) / INNER_HEADS, rows = min_of(here.row + TILE_Q, here.q.room) / INNER_HEADS - first, row0 = here.q.begin / INNER_HEADS + first;
    clear<Warp>(rows_of<Result>(p.out, here.batch, head, row0, row0 + rows, p.dim_v));
    for_lane(l) {
      #pragma unroll 1
      for (int row = l; row < rows && p.lse.data; row += 32) write(row_slice(p.lse, here.batch, head, row0 + row), -infinity());
    }
  }
}

// What the producer tells a consumer with its queries. It has the time to work that out; a consumer between two tiles keeps tensor cores waiting.
enum Next { NOTHING, LATER, DIRECTLY };                       // DIRECTLY: the next tile begins beneath the last product of this one
// Where what is added to a score does not depend on it, S starts from that, before the turn to multiply comes: S += Q K^T. Not in a query tile's first
// step, nor where the maximum is far from 0 (`unsettled`). Between two steps P is an operand then: as scores it would have the registers of the next S.
constexpr bool STARTS_FROM_TERM = SCORES == PLUS_TERM && !EXPLICIT_SCORES && !PACK_GQA && (!MASKED_PAIRS || (PAIR_BITS && (STAGED_BIAS || WIDTH_V > 64)));
constexpr bool KEPT_ONCE = STARTS_FROM_TERM || FOUR_CAPPED;   // whether a step looks for its maximum: in a register of the warp, where predicates are short
// Integers cost most beneath products, so at dims up to 64 the producer tells of which key tiles a consumer's rows see all keys. As measured: wider rows,
// sequences of their own lengths and other scores are no faster, or have no registers.
constexpr bool TELLS_WHOLE = max_of(WIDTH, WIDTH_V) <= 64 && (!VARLEN || CLEARS_QUERIES) && !PAIR_BITS && (SCORES == UNCHANGED || WITH_TERMS || ((STAGED_BIAS || STARTS_FROM_TERM) && GROUPS == 4));
static_assert(!OWN_LISTS || GROUPS <= MOST_CONSUMERS, "each is told of its pairs");
struct alignas(16) WorkDescriptor {
  int batch[2], head, row;                                    // where the block's query tile begins; the last two batch axes, the others are 0
  int first, last;                                            // key tiles that the consumer needs
  int before, beyond;                                         // how many its block needs before and beyond those
  int next;                                                   // whether and when another one follows
  u32 split;                                                  // number of the split of a query tile, or WHOLE
  int whole_first, whole_end;                                 // TELLS_WHOLE: key tiles of which all its queries see all keys
};
// VARLEN: and with these of their sequence, and of its mask. Its queries before the tile are left out: what a consumer has of two tiles at a time
// takes registers.
struct alignas(16) SequenceDescriptor {
  int begin_q, len_q, len_kv;
  int left, right, prefix;
};
template <typename Coord> OP void store_sequence(SharedAddress to, const Mask& mask, const Coord& here) {
  if constexpr (VARLEN) {
    const MaskParams& of = mask.of;
    store_once(to, SequenceDescriptor{here.q.begin + here.row, here.q.count - here.row, here.kv.count, of.left, of.right, of.prefix});
  }
}
template <typename Coord> OP void load_sequence(SharedAddress from, Mask& mask, Coord& here) {
  if constexpr (VARLEN) {
    const SequenceDescriptor of = load_shared<SequenceDescriptor>(from);
    here.q = {uniform(of.begin_q), uniform(of.len_q), 0, 0, 0};
    here.kv = {0, uniform(of.len_kv), 0, 0, 0};
    mask.of.left = uniform(of.left);
    mask.of.right = uniform(of.right);
    mask.of.prefix = uniform(of.prefix);
    mask.len_kv = here.kv.count;
  }
}
template <typename Params, typename Coord> OP int queries_of_sequence(const Params& p, const Coord& here) {
  return rows_at<QUERIES>(p, here).len() + (VARLEN ? here.row : 0);
}
// at least one: arrays are read for masked pairs as well
template <typename Params, typename Coord> OP int keys_of_sequence(const Params& p, const Coord& here) {
  return VARLEN ? max_of(rows_at<KEYS>(p, here).len(), 1) : rows_at<KEYS>(p, here).len();
}

// FROM_LAST: the range of those tiles if they are counted from the last of all on, and where a tile then is. Consumers, which only count upwards, are
// told -tile. Of a term that BENDS scores are largest at the diagonal: there its tile comes first, and then the others as they lie. That is planned only
// where all queries see all keys, so that every consumer needs each tile, and finds by itself which comes first.
static_assert(!FROM_LAST || !TILE_LIST, "lists begin with the first");
OP int mirrored(const NBlockRange& all, int tile) { return all.begin + all.end - 1 - tile; }
OP NBlockRange mirrored(const NBlockRange& all, const NBlockRange& some) { return {mirrored(all, some.end - 1), mirrored(all, some.begin) + 1}; }
// The tile that the diagonal goes through in the middle of a query tile, of those up to `last`.
template <typename Params, typename Coord> OP int first_of_diagonal(const Params& p, const Coord& here, int len_q, int last) {
  const ScoreContext x = score_context(p, here, here.head, HeadTerms{}, len_q, keys_of_sequence(p, here));
  return min_of(max_of(here.row + TILE_Q / 2 + diagonal_of(x), 0) / TILE_KV, last);
}
// In which order the producer brings them: from the last one on, or BENDS beginning with another than the first.
struct KeyOrder {
  bool from_last;
  int first;
};
template <typename Params, typename Coord>
OP KeyOrder key_order(const Params& p, const Coord& here, const NBlockRange& tiles, bool rises, bool split) {
  if constexpr (BENDS) return {false, split ? tiles.begin : first_of_diagonal(p, here, rows_at<QUERIES>(p, here).len(), tiles.end - 1)};
  else return {bool(uniform(u32(rises))), 0};
}
// Where a tile is. A consumer counts from the first on, or from -last, and `turned` is -1 if it does that, or BENDS the tile that comes first.
OP int place_of(int turned, int tile, [[maybe_unused]] bool first) {
  if constexpr (BENDS) return first ? turned : tile - (tile <= turned);
  else return (tile ^ turned) - turned;
}
OP int place_of(const KeyOrder& order, const NBlockRange& tiles, int tile) {
  if constexpr (BENDS) return place_of(order.first, tile, tile == tiles.begin);
  else return order.from_last ? mirrored(tiles, tile) : tile;
}

// The work of a consumer in a query tile that it begins beneath the end of one of whose key tiles it leaves so many unread (`left`).
OP WorkDescriptor describe_work(const WorkParams& p, const Mask& mask, u32 index, const WorkTile& here, const NBlockRange& tiles, const KeyOrder& order, const QueryLists& lists, int group, int left, bool follows) {
  WorkDescriptor work;
  #pragma unroll
  for (int i = 0; i < 2; ++i) work.batch[i] = here.batch[BATCH_AXES - 2 + i];
  work.head = here.head;
  work.row = here.row;
  const int row = here.row + group * ROWS;
  const NBlockRange seen = n_block_range(mask, row, min_of(ROWS, rows_at<QUERIES>(p, here).len() - row), TILE_KV, tiles);
  NBlockRange own = SPLIT_KV ? clip_range(tiles, seen) : seen;
  if constexpr (FROM_LAST && !BENDS) if (order.from_last) own = mirrored(tiles, own);
  // Tiles are split only where all rows see the first keys. With more tiles before, the producer would wait for stages of V that a consumer
  // has not come to, and the consumer for keys; or, with ping-pong, for other consumers, which wait for the producer.
  work.before = SPLIT_KV ? 0 : min_of(own.begin - tiles.begin, max_of(STAGES_V - 1 - left, 0));
  work.first = tiles.begin + work.before;
  work.last = own.end - 1;
  work.beyond = tiles.end - own.end;
  if constexpr (FROM_LAST && !BENDS) if (order.from_last) work.first = -mirrored(tiles, work.first), work.last = -mirrored(tiles, work.last);
  if constexpr (TILE_LIST) {                                  // all consumers are given the tiles that one of them sees, and count them
    work.first = work.before = work.beyond = 0;
    work.last = max_of(lists.count(tiles.begin, tiles.end), 1) - 1;
  }
  // With more tiles beyond, the producer would wait for their stages to be released before it brings the next queries.
  const bool few = work.beyond < min_of(STAGES, STAGES_V);
  work.next = !follows ? NOTHING : AHEAD && few && (ENDS_SPLITS || !is_split(p, index + 1, here)) ? DIRECTLY : LATER;
  work.split = is_split(p, index, here) ? here.split.number : WHOLE;
  if constexpr (TELLS_WHOLE) {
    const ColumnRange unmasked = unmasked_keys(mask, row, ROWS);
    work.whole_first = ceil_div(max_of(unmasked.first, 0), TILE_KV);
    work.whole_end = max_of(unmasked.last + 1, 0) / TILE_KV;
  }
  return work;
}

// The kinds of step. A step computes S and P of a key tile above the second product of the key tile before:
//   within   both are of one query tile
//   across   the one before was the last of another query tile, which ends here. If none is left to end, the second product counts for
//            nothing: it takes K for V, which need not have come, so that two kinds of step, or all, have one text
//   alone    a query tile's first, where query tiles do not overlap: there is no second product
constexpr bool ONE_TEXT = AHEAD && WIDTH_V > 128;             // of a step: compiled a fifth sooner, and level. Narrower rows would lose a tenth
struct Step {
  bool follows, starts, ends;                                 // there is a second product; the query tile is new; another one ends
  static OP Step within() { return {true, false, false}; }
  static OP Step across(bool ends) { return {true, true, ends}; }
  static OP Step alone() { return {false, false, false}; }
};
// What pairs have in arrays comes beneath the product of the scores: wider heads leave registers for no addresses.
constexpr bool ARRAYS_AHEAD = WIDTH_V < 128 || STAGED_BIAS || PAIR_BITS || PACK_GQA;
constexpr bool DROPS_LATE = DROPOUT && GROUPS == 4;           // at the end of a step, from P as an operand: four groups have no registers for masks beside S
constexpr bool PACKS_LATE = DROPS_LATE || STARTS_FROM_TERM;   // P becomes an operand at the end of a step

// A pass of the producer brings keys, and the values of the key tile before. Within a query tile both are its own; across two of them, the
// first keys of the next come with the last values of this one (of none at the very beginning); the end has values only.
struct Pass {
  bool last, across;                                          // last: there are no more keys for the query tile
  OP bool has_keys() const { return across || !last; }
  OP bool is_end() const { return last && !across; }
};

// key_block.cuh -- a block of the backward for sm_90a, whichever way its warpgroups share the products: it owns TILE_KV keys, and the query
// tiles that see one of them pass through it. The first warpgroup is the producer; the others are consumers, which compute.
#pragma once
#include "tile/bias_tile.cuh"
#include "tile/clipped.cuh"
#include "tile/key_places.cuh"
#include "tile/mask.cuh"
#include "tile/passes.cuh"
#include "tile/tile_list.cuh"
constexpr bool CUTS_ADDRESSES = true;                         // as measured: 4 % at dim 64, nothing at 128, and 1 to 2 % the other way beyond
#include "tile/gradient_parts.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = WARPS / 4 - 1;                         // consumer warpgroups
constexpr int DQ_GROUPS = GROUPS > 2 ? 1 : GROUPS;            // and those of them that add to dQ

// Of the registers that a launch deals out evenly, the producer gives back most.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = min_of((REGISTERS * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8, 240);

using KeyTile = OperandTile<TILE_KV, DIM>;                      // of k
using ValueTile = OperandTile<TILE_KV, DIM_V>;                  // of v
using QueryTile = OperandTile<TILE_Q, DIM>;                     // of q
using DoutTile = OperandTile<TILE_Q, DIM_V>;                    // of dout
using QueryStage = MaybeWithBias<QueryTile>;
using GradientTile = OperandTile<TILE_Q, TILE_KV>;              // dS
using OutTile = PanelTile<64 * GROUPS, WIDTH>;                // 16 rows of dq for each consumer warp, where Q was,
constexpr bool FINISHES_BY_LANES = FP16_PARTS > 0 || GROUPS > 2;      // unless TMA could not store them, or there are too few registers for a whole row
static_assert(ceil_div(DIM, 64) == ceil_div(WIDTH, 64) && ceil_div(DIM_V, 64) == ceil_div(WIDTH_V, 64), "products take some columns of every panel");
static_assert(FINISHES_BY_LANES || OutTile::bytes <= STAGES * QueryTile::bytes, "finished rows of dq fit where Q was");

// Shared memory: K and V, in whose place their gradients leave; Q and dO; dS of two steps; lse and delta; dQ if it is staged; barriers.
constexpr int STAGES_KV = WHOLE_HEADS && !STAGED_BIAS ? 2 : 1; // the next key tile comes beneath the steps of this one, where there is room
constexpr bool LOADS_KEYS_APART = STAGES_KV > 1;
constexpr int V_OFFSET = STAGES_KV * KeyTile::bytes;
constexpr int Q_OFFSET = V_OFFSET + STAGES_KV * ValueTile::bytes;
constexpr int DO_OFFSET = Q_OFFSET + STAGES * QueryStage::bytes;
constexpr int DS_OFFSET = DO_OFFSET + STAGES * DoutTile::bytes;
constexpr int STAT_BYTES = TILE_Q * int(sizeof(float));
// CLUSTER: of dS of all its blocks, the rows that this one sums up, of two steps.
using SliceTile = PanelTile<TILE_Q / CLUSTER, TILE_KV>;
constexpr int SLICE_STAGES = 2, SLICES_BYTES = CLUSTER > 1 ? SLICE_STAGES * GradientTile::bytes : 0;
constexpr int SLICES_OFFSET = DS_OFFSET + 2 * GradientTile::bytes;
constexpr int LSE_OFFSET = SLICES_OFFSET + SLICES_BYTES;
constexpr int DELTA_OFFSET = LSE_OFFSET + STAGES * STAT_BYTES;
constexpr int DQ_OFFSET = DELTA_OFFSET + STAGES * STAT_BYTES;         // of each consumer warpgroup
constexpr int DQ_BYTES = TMA_REDUCE_DQ ? TILE_Q * WIDTH / GROUPS * int(sizeof(float)) : 0;
constexpr int K_BARRIERS = DQ_OFFSET + GROUPS * DQ_BYTES;
constexpr int V_BARRIERS = K_BARRIERS + STAGES_KV * STAGE_BARRIERS;
constexpr int Q_BARRIERS = V_BARRIERS + STAGES_KV * STAGE_BARRIERS;
constexpr int DO_BARRIERS = Q_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int DS_BARRIER = DO_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int ORDER_BARRIERS = DS_BARRIER + Mbarrier::bytes;
constexpr int END_BARRIERS = ORDER_BARRIERS + (TMA_REDUCE_DQ ? 2 * GROUPS : 3) * Mbarrier::bytes;
constexpr int LAST_OFFSET = END_BARRIERS + 3 * Mbarrier::bytes;
constexpr int FIRST_OFFSET = LAST_OFFSET + int(sizeof(u32));  // FIRST_STORES: whether the block is the first to add, in this step
constexpr int CLIPPING_BARRIER = FIRST_OFFSET + int(sizeof(u32));
constexpr int HEADS_OFFSET = CLIPPING_BARRIER + VARLEN * Mbarrier::bytes;            // of what a block needs again later: its heads, and its place
constexpr int PLACE_OFFSET = VARLEN ? ceil_div(HEADS_OFFSET + 2 * int(sizeof(int)), 16) * 16 : HEADS_OFFSET;
constexpr int PLACE_END = PLACE_OFFSET + VARLEN * int(sizeof(KeyPlace));
// TILE_LIST: what the producer, which goes through the list, tells consumers of the query tile of a stage.
struct alignas(16) ListedTile {
  u32 tile;                                                   // twice its number, and 1 more if no pair of it is masked one by one
  int head;
  u32 number;                                                 // KeyBlock::accum_number
};
static_assert(!TILE_LIST || !VARLEN, "load_tiles_of_sequence tells nobody");
constexpr int LISTED_OFFSET = ceil_div(PLACE_END, 16) * 16;
constexpr int LISTED_END = TILE_LIST ? LISTED_OFFSET + STAGES * int(sizeof(ListedTile)) : PLACE_END;
// PERSISTENT: what the scheduler warp, which takes key tiles, tells the others of one, and a stage of it.
struct TakenKeys {
  static constexpr int bytes = 32;
  SharedAddress base;
};
struct alignas(16) TakenCoord {
  int steps;                                                  // -1: there is no key tile any more
  int tile, first_head, head_kv;
  u32 batch_number;
  int batch[2];                                               // of more axes, TMA would not tell them apart
};
static_assert(sizeof(TakenCoord) == TakenKeys::bytes);
static_assert(!PERSISTENT || ((TILE_LIST || WHOLE_HEADS) && !STORE_DBIAS && !TMA_REDUCE_DQ), "no block has them that takes key tiles");
static_assert(!WHOLE_HEADS || (PERSISTENT && !TILE_LIST && !VARLEN && !FIRST_STORES), "a block knows by the mask alone which of its key tiles is the first and the last that sees a query tile");
constexpr int TAKEN = 2;                                      // one ahead
constexpr int TAKEN_OFFSET = ceil_div(LISTED_END, 16) * 16, TAKEN_BARRIERS = TAKEN_OFFSET + TAKEN * TakenKeys::bytes;
constexpr int LOADED_BARRIER = TAKEN_BARRIERS + TAKEN * STAGE_BARRIERS;
// STATS_AHEAD: rows of a later head.
struct OutAndDout {
  typedef PanelTile<TILE_Q, DIM_V> Rows;
  static constexpr int bytes = 2 * Rows::bytes;
  SharedAddress base;
  OP Rows out() const { return {base}; }
  OP Rows dout() const { return {base + Rows::bytes}; }
};
static_assert(!STATS_AHEAD || (!FP16_PARTS && !TILE_LIST && !STAGED_BIAS && !TMA_REDUCE_DQ), "no warps are idle, or nobody makes statistics");
static_assert(!IN_ORDER || (STATS_AHEAD && !VARLEN), "nobody asks without the one, and with the other one warp would be late");
static_assert(!VARLEN || STATS_AHEAD == ZEROS_AHEAD, "the first launch has no blocks for later heads");
static_assert(!VARLEN || !STATS_AHEAD || SCORES != PLUS_LINEAR, "statistics have no term of the queries of a sequence");
constexpr int STATS_WARPS = IN_ORDER ? 1 : 2, STATS_OFFSET = ceil_div(LISTED_END, 1024) * 1024, STATS_BARRIERS = STATS_OFFSET + OutAndDout::bytes;
constexpr int BARRIERS_END = PERSISTENT ? LOADED_BARRIER + 2 * Mbarrier::bytes : STATS_AHEAD ? STATS_BARRIERS + STAGE_BARRIERS : LISTED_END;
static_assert(!ZEROS_AHEAD || (!TILE_LIST && !STAGED_BIAS), "heads have another order, or there is no room");
// ZEROS_AHEAD: zeros, which TMA stores to sums of later heads.
constexpr int ZEROS_OFFSET = ceil_div(BARRIERS_END, 16) * 16, ZEROS = 256;
constexpr int SLICE_BARRIERS = ceil_div(BARRIERS_END, 8) * 8;
static_assert(CLUSTER == 1 || (STORE_DBIAS && !ZEROS_AHEAD && !VARLEN && !TILE_LIST), "blocks of a cluster go through the same steps");
constexpr int BLOCK_BYTES = CLUSTER > 1 ? SLICE_BARRIERS + (2 * SLICE_STAGES + 1) * Mbarrier::bytes : ZEROS_AHEAD ? ZEROS_OFFSET + ZEROS * int(sizeof(float)) : BARRIERS_END;

constexpr Lanes LANES = WIDTH <= 64 ? CONVERGENT : DIVERGENT; // as measured: 5 % at dim 64, and nothing or 5 % the other way at dim 128

// What every warp of a block knows, and how far it is.
struct KeyBlock {
  SharedAddress smem = shared_memory();
  Pipeline<KeyTile, STAGES_KV, LANES> keys{smem, smem + K_BARRIERS};
  Pipeline<ValueTile, STAGES_KV, LANES> values{smem + V_OFFSET, smem + V_BARRIERS};
  Pipeline<QueryStage, STAGES, LANES> queries{smem + Q_OFFSET, smem + Q_BARRIERS};
  Pipeline<DoutTile, STAGES, LANES> douts{smem + DO_OFFSET, smem + DO_BARRIERS};
  Pipeline<TakenKeys, TAKEN, LANES> taken{smem + TAKEN_OFFSET, smem + TAKEN_BARRIERS};
  Mbarrier loaded{smem + LOADED_BARRIER};                     // PERSISTENT: all of a key tile is on its way
  Pipeline<OutAndDout, 1, LANES> of_stats{smem + STATS_OFFSET, smem + STATS_BARRIERS}; // STATS_AHEAD: of a later head
  Mbarrier written{smem + DS_BARRIER};                        // dS of a step is in shared memory, all of it, and that of the step before has left
  // Of dQ, see dq_protocol.cuh. Where lanes add: the semaphore of a step has been acquired; all warps have added; which has been noticed.
  Mbarrier acquired{smem + ORDER_BARRIERS}, added{acquired.address + Mbarrier::bytes}, noticed{added.address + Mbarrier::bytes};
  // Where TMA adds, in the same memory: dQ of a warpgroup is in shared memory; TMA has read it.
  OP Mbarrier staged(int group) const { return {smem + ORDER_BARRIERS + group * Mbarrier::bytes}; }
  OP Mbarrier sent(int group) const { return {smem + ORDER_BARRIERS + (GROUPS + group) * Mbarrier::bytes}; }
  // CLUSTER, see dbias_sums.cuh.
  OP Mbarrier received(int step) const { return {smem + SLICE_BARRIERS + step % SLICE_STAGES * Mbarrier::bytes}; }
  OP Mbarrier summed(int step) const { return {smem + SLICE_BARRIERS + (SLICE_STAGES + step % SLICE_STAGES) * Mbarrier::bytes}; }
  Mbarrier delivered{smem + SLICE_BARRIERS + 2 * SLICE_STAGES * Mbarrier::bytes};
  OP SliceTile slice_smem(int step, u32 rank) const { return {smem + SLICES_OFFSET + step % SLICE_STAGES * GradientTile::bytes + int(rank) * SliceTile::bytes}; }
  Mbarrier ended{smem + END_BARRIERS};                        // the block adds nothing more
  OP Mbarrier ended_of(u32 number) const { return {ended.address + number % 2 * Mbarrier::bytes}; }     // PERSISTENT: of its key tile number 0, 1 ...
  Mbarrier counted{smem + END_BARRIERS + Mbarrier::bytes};    // the block has been counted
  Mbarrier cleared{counted.address + Mbarrier::bytes};        // the sums are zero, and the block may add
  KeyBlockCoord here;                                         // VARLEN: without a tile if no sequence has it
  KeptPlace place;                                            // VARLEN: where the tile lies
  TransposedMask mask;
  u32 head;                                                   // the first query head, counted over all batch elements, or sequences
  u32 packed_tile;                                            // VARLEN, STATS_AHEAD: number of the key tile, counted over all sequences
  int row0;                                                   // the first key, counted from that of the sequence
  int from, to;                                               // the first tile of queries and the last one to come
  int steps;
  u32 first_number;                                           // VARLEN: of the query tiles of the sequence, in head 0
  bool backwards;                                             // the last keys before the first ones, see semaphore_value
  QueryCursor now;
  ListWords listed;                                           // TILE_LIST: words that name the tile at hand
  bool is_whole;                                              // and in a consumer, that no pair of it is masked one by one,
  u32 number, last_number;                                    // its number, and that of the tile before
  u32 tiles_before;                                           // query tiles of heads that had the same sums before, and of all in between

  OP KeyBlock(const HopperBackwardParams& p) {
    if (!PERSISTENT) find(p, [] { return block_id() / CLUSTER; });
  }
  // The key tile with this number, how many query tiles it visits, and the first one.
  template <typename Number> OP void find(const HopperBackwardParams& p, Number key_tile) {
    here = key_block_coord(p, offsets_of<KEYS>(p), key_tile);
    if (VARLEN && warp_id() == 0) init_barriers();            // the other warps read meanwhile, and this one finds in a cache what they have read
    if constexpr (VARLEN && STATS_AHEAD) packed_tile = here.tile;
    read_place(place, p, here);
    head = here.batch_number * p.heads + here.first_head;
    mask = mask_of_place(place, p);
    backwards = head < p.backwards;
    if (!VARLEN && backwards) here.tile = key_tiles(p) - 1 - here.tile;
    row0 = here.tile * TILE_KV;
    const QueryTiles seeing = find_ends(p);
    steps = seeing.count;
    first_number = first_number_of(place);
    if constexpr (TILE_LIST) {
      if (steps > 0) {
        steps = count_listed(here.first_head, p.heads_per_block, seeing.first, seeing.last + 1, [&](int head) { return list_of(p, head); });
        if (!PERSISTENT && warp_id() < 4) find_tile(p);       // consumers are told
      }
    }
    tiles_before = VARLEN ? 0 : WHOLE_HEADS ? own_tiles_before(p) : divide(head, p.accum_heads_divmod) * p.accum_heads_divmod.divisor * ceil_div(p.len_q, TILE_Q);
  }
  OP QueryTiles find_ends(const HopperBackwardParams& p) {
    const QueryTiles seeing = query_tiles(place, mask, row0, p.heads_per_block);
    from = backwards ? seeing.first : seeing.last;
    to = backwards ? seeing.last : seeing.first;
    now = {here.first_head, from};
    return seeing;
  }
  // PERSISTENT: the scheduler warp tells of the key tile at hand, or of none (-1 steps), and the others hear of it.
  OP void tell_keys() {
    store_once(taken.tile().base, TakenCoord{steps, here.tile, here.first_head, here.head_kv, here.batch_number, {here.batch[BATCH_AXES - 2], here.batch[BATCH_AXES - 1]}});
    sync_warp();                                              // without it what is told is read before it has been written
    arrive_at<LANES>(taken.full());                           // without it nobody hears
    taken.advance();
  }
  OP bool hear_keys(const HopperBackwardParams& p) {
    consumer_wait(taken);                                     // without it what has not been told is read
    steps = int(uniform(u32(load_shared<TakenCoord>(taken.tile().base).steps)));
    if (steps < 0) return false;
    hear_place(p);
    backwards = false;                                        // nobody waits for others
    if constexpr (WHOLE_HEADS) find_ends(p);
    return true;
  }
  OP void hear_place(const HopperBackwardParams& p) {         // again, since it would take registers of the loop
    const TakenCoord told = load_shared<TakenCoord>(taken.tile().base);
    here.tile = int(uniform(u32(told.tile))), here.first_head = int(uniform(u32(told.first_head))), here.head_kv = int(uniform(u32(told.head_kv)));
    here.batch_number = uniform(told.batch_number);
    #pragma unroll
    for (int i = 0; i < BATCH_AXES; ++i) here.batch[i] = i < BATCH_AXES - 2 ? 0 : int(uniform(u32(told.batch[i - (BATCH_AXES - 2)])));
    head = here.batch_number * p.heads + here.first_head;
    mask = mask_of_place(place, p);
    row0 = here.tile * TILE_KV;
    tiles_before = WHOLE_HEADS ? own_tiles_before(p) : 0;
  }
  // WHOLE_HEADS: sums are those of the block, not of the head.
  OP u32 own_tiles_before(const HopperBackwardParams& p) const { return (head - block_id() * p.heads_per_block) * ceil_div(p.len_q, TILE_Q); }
  OP Sequence<HopperBackwardParams> seq(const HopperBackwardParams& p) const { return sequence_of_place(place, p, here.batch_number); }
  OP int key_tiles(const HopperBackwardParams& p) const { return ceil_div(VARLEN ? seq(p).kv.len() : p.len_kv, TILE_KV); }
  // with which dq may be complete
  OP bool is_counted(const HopperBackwardParams& p) const {
    const auto of = seq(p);
    return !VARLEN || (row0 < of.kv.len() && of.q.end_of_room() > of.q.first());
  }
  OP TileList list_of(const HopperBackwardParams& p, int head) const { return list_of_keys(p, here.batch_number, head, here.tile); }
  OP void find_tile(const HopperBackwardParams& p) {
    find_listed(now, from, to, here.first_head + p.heads_per_block, listed, [&](int head) { return list_of(p, head); });
  }
  OP void advance(const HopperBackwardParams& p) {
    const int head = now.head;
    now.advance(from, to);
    if constexpr (TILE_LIST) {
      if (now.head != head) listed.number = -1;
      find_tile(p);
    }
  }
  OP u32 number_of(const BackwardParams& p, int head, int tile) const {
    if constexpr (VARLEN) return first_number + head * tiles_of<QUERIES>(p) + tile;
    else return query_tile_number(p, here.batch_number, head, tile);
  }
  OP u32 tile_number(const BackwardParams& p) const { return number_of(p, now.head, now.tile); }
  OP u32 number_before(const BackwardParams& p) const {        // the same of the tile before
    if constexpr (TILE_LIST) return last_number;
    const bool of_last_head = now.tile == from;
    const int tile = of_last_head ? to : now.tile - (from < to ? 1 : -1);
    return number_of(p, now.head - of_last_head, tile);
  }
  OP u32 accum_number(const BackwardParams& p) const { return tile_number(p) - tiles_before; }  // of the tile among those that have sums at a time
  OP void init_barriers() const {
    init_pipeline(keys, PERSISTENT ? 4 * GROUPS : 1);
    init_pipeline(values, PERSISTENT ? 4 * GROUPS : 1);
    if constexpr (PERSISTENT) {
      init_pipeline(taken, 1);                                // nobody releases a stage, see take_key_tiles
      init_mbarrier(loaded, 1 + LOADS_KEYS_APART);            // warps that load
    }
    if constexpr (STATS_AHEAD) init_pipeline(of_stats, STATS_WARPS);
    init_pipeline(queries, 4 * GROUPS);                       // warps that hand a tile back
    init_pipeline(douts, 4 * GROUPS);
    init_mbarrier(written, 4 * GROUPS + STORE_DBIAS);
    if (TMA_REDUCE_DQ) {
      for (int group = 0; group < GROUPS; ++group) {
        init_mbarrier(staged(group), 4);
        init_mbarrier(sent(group), 1);
      }
    } else {
      init_mbarrier(acquired, 1);
      init_mbarrier(added, 4 * DQ_GROUPS);
      init_mbarrier(noticed, 1);
    }
    init_mbarrier(ended, TMA_REDUCE_DQ ? GROUPS : 4 * GROUPS);
    init_mbarrier(counted, PERSISTENT ? 4 * GROUPS : 1);      // then it is the second one of `ended_of`
    init_mbarrier(cleared, 1);
    if constexpr (CLUSTER > 1) {
      for (int i = 0; i < SLICE_STAGES; ++i) {
        init_mbarrier(received(i), 1);
        init_mbarrier(summed(i), SliceTile::panels * CLUSTER);
      }
      init_mbarrier(delivered, CLUSTER);
    }
    if (VARLEN) init_clipping(Clipping{smem + CLIPPING_BARRIER});
  }
  // TILE_LIST: the producer tells of the query tile at hand, and a consumer hears of it when the tile has come.
  OP void tell_tile(const HopperBackwardParams& p) const {
    store_once(listed_smem(), ListedTile{u32(now.tile) * 2 + listed.is_whole(now.tile), now.head, accum_number(p)});
    sync_warp();                                              // without it what is told is read before it has been written
  }
  OP void hear_tile() {
    const ListedTile told = load_shared<ListedTile>(listed_smem());
    const u32 tile = uniform(told.tile);
    now = {uniform(told.head), int(tile / 2)};
    is_whole = tile % 2;
    number = told.number;
  }
  OP void go_on(const HopperBackwardParams& p) {              // a consumer, to the next step
    if constexpr (TILE_LIST) last_number = number;
    else advance(p);
  }
  OP SharedAddress listed_smem() const { return smem + LISTED_OFFSET + queries.stage() * int(sizeof(ListedTile)); }
  OP SharedAddress lse_smem() const { return smem + LSE_OFFSET + queries.stage() * STAT_BYTES; }
  OP SharedAddress delta_smem() const { return smem + DELTA_OFFSET + douts.stage() * STAT_BYTES; }
  OP SharedAddress dq_smem(int group) const { return smem + DQ_OFFSET + group * DQ_BYTES; }
  OP GradientTile ds_smem(u32 step) const { return {smem + DS_OFFSET + step % 2 * GradientTile::bytes}; }
};

// VARLEN: what would take registers of the loop is kept in shared memory: the mask of the sequence, which few steps ask, and where it and the
// block are, which is asked behind the loop. Stored by one warp, before a sync_block.
template <typename Block> OP void store_place(const Block& block) {
  if constexpr (VARLEN) {
    store_once(block.smem + HEADS_OFFSET, block.here.first_head);
    store_once(block.smem + HEADS_OFFSET + int(sizeof(int)), block.here.head_kv);
    store_once(block.smem + PLACE_OFFSET, block.place);
  }
}
template <typename Block> OP void load_place(Block& block) {
  if constexpr (VARLEN) {
    block.place = load_shared<KeyPlace>(block.smem + PLACE_OFFSET);
    take_place(block.here, block.place);
    block.here.first_head = load_shared<int>(block.smem + HEADS_OFFSET);
    block.here.head_kv = load_shared<int>(block.smem + HEADS_OFFSET + int(sizeof(int)));
  }
}
OP decltype(auto) mask_again(const KeyBlock& block) {
  if constexpr (VARLEN) return load_shared<TransposedMask>(block.smem + PLACE_OFFSET);           // what it begins with
  else return (block.mask);
}

// STATS_AHEAD, ZEROS_AHEAD: the head by whose number blocks tell that they have made something for it, and how many do.
OP u32 head_ahead(const KeyBlock& block) { return VARLEN ? u32(block.here.first_head) : block.head; }
OP int makers(const HopperBackwardParams& p) { return VARLEN ? int(p.makers) : ceil_div(p.len_kv, TILE_KV); }

// By one warp, before a sync_block.
OP void start_barriers(const KeyBlock& block) {
  if (!VARLEN) block.init_barriers();
  store_place(block);
}

// 16 rows of dk or dv leave: to the result through the warp's rows of a tile that nobody reads any more, or to the sums of several blocks. BY_LANES:
// without such a tile.
template <bool BY_LANES = false, int N>
OP void store_gradient(const HopperBackwardParams& p, const KeyBlock& block, const TensorMap& map, bool of_values, float* accum,
                       const PanelTile<TILE_KV, N>& tile, const Acc<16, N>& acc, int row) {
  const KeyBlockCoord& here = block.here;
  if (accum) {
    const auto keys = block.seq(p).kv;
    const u32 unit = (keys.batch_number() * p.heads + here.first_head) / p.heads_per_block;
    const i64 number = i64(unit) * tiles_of<KEYS>(p) + keys.first_tile() + here.tile;
    typedef Choose<N == DIM, DkAccum, DvAccum> Accum;
    store(Accum{accum + number * Accum::size}, acc, row, 0);
    return;
  }
  const auto keys = block.seq(p).kv;
  const int first = keys.first() + block.row0 + row;
  if (BY_LANES || FLOAT32_RESULTS || (VARLEN && first + 16 > keys.end_of_room())) { // of float32, a tile has no room; TMA would write beyond the sequence
    store(rows_of<Result>(of_values ? p.dv : p.dk, here.batch, here.head_kv, first, keys.end_of_room(), of_values ? p.dim_v : p.dim), acc);
    return;
  }
  store(tile, acc, row);
  fence_proxy_async();                                        // without it rows leave that have not been written
  store_async(map, here.batch, here.head_kv, first, tile, row);
}

// VARLEN: gradients of a tile that nobody sees, of padding or of a sequence without queries, by all warps at once. Nothing is counted of it either, so that
// a block has nothing else to do. false: it has.
OP bool leaves_zeros(const HopperBackwardParams& p, const KeyBlock& block) {
  if constexpr (!VARLEN || STATS_AHEAD) return false;         // which others wait for
  const bool negative = p.scale < 0;                          // times which a block without steps, but counted, leaves zeros of that sign
  if (block.here.tile < 0 || block.is_counted(p) || p.dk_accum || p.dv_accum || negative) return false;
  if constexpr (!ADD_RESULTS) {
    const KeyBlockCoord& here = block.here;
    const auto keys = block.seq(p).kv;
    const int first = keys.first() + block.row0, end = min_of(first + TILE_KV, keys.end_of_room());
    clear<Block>(rows_of<Result>(p.dk, here.batch, here.head_kv, first, end, p.dim));
    clear<Block>(rows_of<Result>(p.dv, here.batch, here.head_kv, first, end, p.dim_v));
  }
  return true;
}

// STORE_DBIAS. By an idle warp: dS of each step leaves as the gradient of the bias, from where consumers leave it for dQ. The warp is one of those
// that `written` counts, and arrives when TMA has read dS of the step before, whose memory nobody writes to until then.
OP void send_dbias(const HopperBackwardParams& p, KeyBlock& block) {
  #pragma unroll 1
  for (int step = 0; step < block.steps; ++step, block.advance(p)) {
    arrive_at<LANES>(block.written);                          // without it the consumers wait for ever
    wait_for<LANES>(block.written, step % 2);                 // without it dS leaves that has not been written
    store_async<TILE_Q>(p.dbias_map, block.here.batch, block.now.head, block.now.tile * TILE_Q, PanelTile<TILE_Q, TILE_KV>{block.ds_smem(step).base}, 0, block.row0);
    wait_for_stores();                                        // without it dS is overwritten that has not left
  }
}

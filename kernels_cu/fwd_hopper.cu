// fwd_hopper.cu -- the forward of FlashAttention-2 for sm_90a: the loop of fwd_v2.cu, with TMA, products of whole
// warpgroups (wgmma) and each softmax beneath the products of its neighbours (FlashAttention-3: Shah et al., 2024).
//
//   A block stays and takes one query tile Q_i after the other. Its first warpgroup loads, each other one owns 64 rows of Q_i:
//
//   producer: for each Q_i:  Q_i, K_0, K_1, V_0, K_2, V_1 ...                 in the order of use, as far ahead as there is room,
//                            the next K_0, V_last                             and the next Q_i ahead of these as far as there are slots
//
//   others:   for each Q_i:
//               S = Q_i K_0^T;  P, m, l = softmax S                           beneath the last product of the tile before
//               for j = 1, 2 ...:
//                 start S = Q_i K_j^T                                         PINGPONG: one warpgroup after the other starts both
//                 start O = O + P V_{j-1}
//                 wait for S;  P' = 2^(S - m),  l = l + rows of P'            beneath the second product
//                 if P' is too large: S = Q_i K_j^T again, and P', m', l anew with the maximum of S
//                 wait for O;  O = 2^(m - m') O,  P = P'                      in most steps m stays
//               O = O + P V_last
//               out_i = O / l,  lse_i = m + log l                             leaves while the next tile is computed
//
//   Tiles Q_i that would keep some blocks busy and others idle are shared: a block computes a part, which is some of the K_j, and
//   fwd_hopper_combine makes one of all parts.
#include "config.cuh"
#include "params.cuh"
#include "tile/pipeline.cuh"
#include "tile/copy.cuh"
#include "tile/mask.cuh"
#include "tile/scheduler.cuh"
#include "tile/softmax.cuh"
#include "tile/accum.cuh"
#include "tile/wgmma.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = WARPS / 4 - 1;                         // warpgroups that compute
constexpr int ROWS = TILE_Q / GROUPS;                         // of Q, for each of them
static_assert(ROWS == 64, "a warpgroup owns 64 query rows");
static_assert(GROUPS > 1 || !PINGPONG, "one warpgroup is no line");

// Of the registers that a launch deals out evenly, the producer gives back most.
constexpr int REGISTERS = 65536 / (THREADS * MIN_BLOCKS) / 8 * 8;
constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = min_of((REGISTERS * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8, 240);

using KeyTile = PanelTile<TILE_KV, WIDTH>;
using ValueTile = PanelTile<TILE_KV, WIDTH_V>;
using QueryTile = PanelTile<ROWS, WIDTH>;
using OutTile = PanelTile<ROWS, WIDTH_V>;

using PartialTile = AccumTile<TILE_Q, WIDTH_V>;               // out of a part of a query tile, in device memory
OP PartialTile out_partial(const HopperForwardParams& p, u32 number) { return {p.out_partials + i64(number) * p.partial_rows * WIDTH_V}; }

static_assert(STAGES_Q >= GROUPS, "each warpgroup reads a slot");
constexpr bool AHEAD = STAGES_Q > GROUPS;                     // a query tile begins before the one before it has ended
constexpr bool ONE_TEXT = AHEAD && WIDTH_V > 128;             // of a step: compiled a fifth sooner, and level. Narrower rows would lose a tenth

// What the producer tells a warpgroup with its queries. It has the time to work that out; a warpgroup between two tiles keeps tensor cores waiting.
enum Next { NOTHING, LATER, DIRECTLY };                       // DIRECTLY: it begins beneath the last product of this one
constexpr u32 WHOLE = ~u32(0);
struct alignas(16) WorkDescriptor {
  int batch[2], head, row;                                    // where the block's query tile begins; the last two batch axes, the others are 0
  int first, last;                                            // key tiles that the warpgroup needs
  int before, beyond;                                         // how many its block needs before and beyond those
  int next;                                                   // whether there is another work
  u32 part;                                                   // number of the part of a query tile, or WHOLE
};
// The work of a warpgroup in a turn that it begins beneath the end of one of which so many tiles are `left`.
OP WorkDescriptor describe_work(const HopperForwardParams& p, const Band& band, u32 index, const WorkTile& here, const NBlockRange& tiles, int group, int left, bool follows) {
  WorkDescriptor work;
  #pragma unroll
  for (int i = 0; i < 2; ++i) work.batch[i] = here.batch[BATCH_AXES - 2 + i];
  work.head = here.head;
  work.row = here.row;
  const int row = here.row + group * ROWS;
  const NBlockRange seen = n_block_range(band, row, min_of(ROWS, p.len_q - row), TILE_KV, tiles), own = SPLIT_KV ? clip_range(tiles, seen) : seen;
  // Keys are shared where all rows see the first ones. With more tiles before, the producer waits for values to be free that a warpgroup has
  // not come to, and the warpgroup for keys; or, in line, for others, which wait for the producer.
  work.before = SPLIT_KV ? 0 : min_of(own.begin - tiles.begin, max_of(STAGES_V - 1 - left, 0));
  work.first = tiles.begin + work.before;
  work.last = own.end - 1;
  work.beyond = tiles.end - own.end;
  // With more tiles between two turns, the producer waits for places to be free before it brings the next queries.
  const bool few = work.beyond < min_of(STAGES, STAGES_V);
  work.next = !follows ? NOTHING : AHEAD && few && !is_split(p, index + 1) ? DIRECTLY : LATER;
  work.part = is_split(p, index) ? here.split.number : WHOLE;
  return work;
}

// Shared memory: queries, 64 rows of them in each slot; rows of out that leave, for each warpgroup; K; V; barriers; work descriptors.
constexpr int EARLY = min_of(STAGES_Q - GROUPS, GROUPS);      // warpgroups whose next queries need not wait until others have read theirs
constexpr int LEAD = (GROUPS - 1) * ROWS / TILE_KV;           // tiles: under a mask, so many may be left when the first warpgroup ends its turn
constexpr bool SHARED_STAGES = STAGES_Q % GROUPS != 0;        // in a slot, so that all of them have to notice each filling of it
constexpr int OUT_OFFSET = STAGES_Q * QueryTile::bytes;
constexpr int K_OFFSET = OUT_OFFSET + TMA_STORE_OUT * GROUPS * OutTile::bytes;
constexpr int V_OFFSET = K_OFFSET + STAGES * KeyTile::bytes;
constexpr int K_BARRIERS = V_OFFSET + STAGES_V * ValueTile::bytes;
constexpr int V_BARRIERS = K_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int Q_BARRIERS = V_BARRIERS + STAGES_V * STAGE_BARRIERS;
constexpr int WORK_OFFSET = Q_BARRIERS + STAGES_Q * STAGE_BARRIERS;
[[maybe_unused]] constexpr int SHARED_BYTES = WORK_OFFSET + STAGES_Q * int(sizeof(WorkDescriptor));

KERNEL(THREADS, MIN_BLOCKS) fwd_hopper(GRID_CONSTANT HopperForwardParams p) {
  const SharedAddress smem = shared_memory();
  const int warp = int(uniform(u32(warp_id()))), group = warp / 4 - 1;
  Pipeline<KeyTile, STAGES, ELECT_ONE> keys{smem + K_OFFSET, smem + K_BARRIERS};
  Pipeline<ValueTile, STAGES_V, ELECT_ONE> values{smem + V_OFFSET, smem + V_BARRIERS};
  Pipeline<QueryTile, STAGES_Q, ELECT_ONE> queries{smem, smem + Q_BARRIERS}; // those of each warpgroup in turn
  const Band band{p.band_left, p.band_right, p.len_kv, p.queries_divmod};

  if (warp == 0) {
    init_pipeline(keys, 4 * GROUPS);                          // warps that hand a tile back
    init_pipeline(values, 4 * GROUPS);
    init_pipeline(queries, SHARED_STAGES ? 4 * GROUPS : 4);
  }
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet

  if (group < 0) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    if (warp > 0) return;
    u32 index = 0;                                            // the one to begin next
    WorkTile here{};                                          // of the turn begun last
    NBlockRange tiles{};
    int head_kv = 0;                                          // once a turn: a division takes as long as some loads
    const auto begin_tile = [&] {
      here = work_tile_coord(p, index, TILE_Q);
      head_kv = here.head / p.heads_per_kv;
      tiles = n_block_range(band, here.row, min_of(TILE_Q, p.len_q - here.row), TILE_KV, {0, 1});
      if (is_split(p, index)) tiles = clip_range(here.split.keys, tiles);
    };
    u32 left = 0;                                             // tiles that a warpgroup leaves, where it goes on directly: four bits for each
    static_assert(min_of(STAGES, STAGES_V) <= 16 && GROUPS <= 8, "they hold what a warpgroup may leave");
    const auto load_queries = [&](int first, int end) {
      const bool follows = has_work_tile(p, index + 1);
      #pragma unroll 1
      for (int of = first; of < end; ++of) {
        const WorkDescriptor work = describe_work(p, band, index, here, tiles, of, int(left >> 4 * of & 15), follows);
        left = (left & ~(15u << 4 * of)) | u32(work.next == DIRECTLY ? work.beyond : 0) << 4 * of;
        producer_acquire(queries);                            // without it queries are overwritten that are still read
        store_once(smem + WORK_OFFSET + queries.stage() * int(sizeof(WorkDescriptor)), work);
        sync_warp();                                          // without it a work is read that has not been written
        load_async(queries, p.q_map, here.batch, here.head, here.row + of * ROWS);
      }
    };
    // Keys one tile ahead of values, from turn to turn. Whatever is done between a slot that becomes free and its load, the others wait for.
    BlockCoord of_keys{}, of_values{};                        // whose head is that of keys
    int tile = 0, end = 1;                                    // of values, and beyond the last one of its turn; at first there are none
    bool any = false, told = false;                           // told: the next turn's queries are on their way
    #pragma unroll 1
    for (;;) {
      const bool last = tile + 1 == end;
      if (!told && tile + 1 + LEAD >= end && has_work_tile(p, index)) {
        begin_tile();
        load_queries(0, any ? EARLY : GROUPS);
        told = true;
      }
      const bool begins = last && told;
      if (begins) {
        of_keys = here;
        of_keys.head = head_kv;
      }
      const int next = begins ? tiles.begin : tile + 1;
      if (begins || !last) {
        producer_acquire(keys);                               // without it keys are overwritten that a slower warp still reads
        load_async(keys, p.k_map, of_keys.batch, of_keys.head, next * TILE_KV);
      }
      if (any) {
        producer_acquire(values);                             // without it values are overwritten that a slower warp still reads
        load_async(values, p.v_map, of_values.batch, of_values.head, tile * TILE_KV);
        if (EARLY < GROUPS && begins) load_queries(EARLY, GROUPS);
      }
      if (last && !begins) break;
      of_values = of_keys;
      any = true;
      tile = next;
      if (begins) {
        end = tiles.end;
        told = false;
        ++index;
      }
    }
    return;
  }

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  QueryTile q_smem;
  Acc<16, TILE_KV> s_reg;
  OperandA<16> p_reg[TILE_KV / 16];
  Acc<16, WIDTH_V> o_reg;
  OnlineSoftmax<16> softmax(LOWEST);
  const float scale_log2 = EXPLICIT_SCORES ? 1.f : p.scale_log2;

  int tile, last, before, beyond, next = has_work_tile(p, 0) ? LATER : NOTHING, warp_row;
  u32 part = WHOLE;
  BlockCoord now, ended;                                      // this turn's, and that of the one before, which ends later than this begins
  int others = group;                                         // slots filled for other warpgroups since this one's last
  const auto begin_tile = [&] {
    if (SHARED_STAGES) skip(queries, others);
    else queries.count += others;
    others = GROUPS - 1;
    q_smem = {uniform(queries.tile().base)};                  // once a turn: dividing by STAGES_Q takes lanes
    consumer_wait(queries);                                   // without it the products read queries that have not arrived
    const WorkDescriptor work = load_shared<WorkDescriptor>(smem + WORK_OFFSET + queries.stage() * int(sizeof(WorkDescriptor)));
    ended = now;
    now = {{0, 0, uniform(work.batch[0]), uniform(work.batch[1])}, uniform(work.head), uniform(work.row), 0};
    if (SPLIT_KV) part = uniform(work.part);
    tile = uniform(work.first);                               // and what follows is kept once for a warp
    last = uniform(work.last);
    before = uniform(work.before);
    beyond = uniform(work.beyond);
    next = uniform(work.next);
    warp_row = now.row + group * ROWS + warp % 4 * 16;
  };
  // The softmax of a turn has ended, and then, with its last product, the turn: of a query tile, or of the part with this number.
  const auto row_of_tile = [&] { return not_ahead(warp_id() - 4) * 16; };
  const auto row_of = [&](const BlockCoord& here) { return here.row + row_of_tile(); };
  const auto end_softmax = [&](const BlockCoord& here, u32 part, RowVec<16>& weight) {
    RowVec<16> lse;
    finalize(softmax, lse);
    weight = softmax.sum;
    if (part != WHOLE) store(p.lse_partials + part * p.partial_rows + row_of_tile(), 1, p.partial_rows - row_of_tile(), lse);
    else if (p.lse.data) store(row_slice(p.lse, here.batch, here.head, row_of(here)), p.lse.row_stride, p.len_q - row_of(here), lse);
    softmax = OnlineSoftmax<16>(LOWEST);
  };
  const auto end_tile = [&](const BlockCoord& here, u32 part, const RowVec<16>& weight) {
    rescale(o_reg, weight);
    if (part != WHOLE) {
      if (row_of_tile() < p.partial_rows) store(out_partial(p, part), o_reg, row_of_tile(), 0);
    } else if (!TMA_STORE_OUT) {
      store(rows_of(p.out, here.batch, here.head, row_of(here), p.len_q, p.dim_v), o_reg);
    } else {
      const int warp = not_ahead(warp_id());
      const OutTile out_smem{smem + OUT_OFFSET + (warp / 4 - 1) * OutTile::bytes};
      wait_for_stores();                                      // without it rows are overwritten that have not left
      store(out_smem, o_reg, warp % 4 * 16);
      fence_proxy_async();                                    // without it rows leave that have not been written
      store_async(p.out_map, here.batch, here.head, row_of(here), out_smem, warp % 4 * 16);
    }
  };

  const auto scores_of_tile = [&] {
    const int col0 = tile * TILE_KV;
    if (EXPLICIT_SCORES) scale_scores(s_reg, p.scale, p.softcap);
    if (!unmasked_keys(band, warp_row, 16).contains(col0, TILE_KV)) mask(s_reg, band, warp_row, col0);
  };

  // A warp whose rows have not all seen something yet looks for the maximum in the next tile as well.
  bool unseen_rows = false;
  bool sums = false;                                          // O holds products of its turn; if not, the next one replaces what it holds
  const auto find_maximum = [&](RowVec<16>& correction) {
    raise(softmax, s_reg, correction, scale_log2);
    unseen_rows = warp_any(seen_nothing(softmax));
  };

  // In line, a warpgroup lets the next one go for a tile that it does not need as well: all of them count the same tiles.
  if (PINGPONG && group == GROUPS - 1) arrive_pingpong(group, GROUPS);  // without it nobody begins
  const auto skip_keys = [&](int tiles) {
    #pragma unroll 1
    for (; PINGPONG && tiles > 0; --tiles) {
      wait_pingpong(group);                                   // without it the line moves on before
      arrive_pingpong(group, GROUPS);                         // as above
      skip(keys, 1);
    }
    if (!PINGPONG) skip(keys, tiles);
  };

  // One key tile. Beneath its product and its softmax runs the second product of the tile before it, if there was one. If that one was
  // in another turn, that turn ends here, and the maximum has to be found; otherwise that of the tiles before nearly always does.
  // A turn that starts where none has to end runs above a product all the same, which counts for nothing and so takes K for V, which need
  // not have come: of three cases, two or all have one text.
  const auto step = [&](const bool follows, const bool starts, const bool ends, const int skipped) {
    const KeyTile k_smem = keys.tile();
    const bool real = ends || !starts || ValueTile::bytes > KeyTile::bytes;
    if (follows) to_operands(p_reg, s_reg);
    consumer_wait(keys);                                      // without it the product reads keys that have not arrived
    if (PINGPONG) wait_pingpong(group);                       // without it products of several warpgroups queue, and no scores are done soon
    start_product_transposed(s_reg, q_smem, 0, k_smem);
    RowVec<16> weight;
    if (follows) {
      if (real) consumer_wait(values);                        // without it the product reads values that have not arrived
      start_product(o_reg, p_reg, real ? values.tile() : ValueTile{k_smem.base}, sums);
      sums = !starts;
    }
    if (PINGPONG) arrive_pingpong(group, GROUPS);             // without it the next warpgroup waits for ever
    if (follows) {
      if (ends) end_softmax(ended, WHOLE, weight);
      wait_for_products<1>(s_reg);                            // without it scores are read that do not exist yet
    } else {
      wait_for_products<0>(s_reg);                            // as well
    }
    scores_of_tile();
    const bool first = !follows || starts, looked = first || unseen_rows;
    RowVec<16> correction, sum;
    fill(correction, 1.f);
    if (looked) find_maximum(correction);
    exponentiate(softmax, s_reg, sum, scale_log2);
    const bool again = !first && warpgroup_any(group, too_large(sum));
    if (again) {
      start_product_transposed(s_reg, q_smem, 0, k_smem);
      wait_for_products<0>(s_reg);                            // as above
      scores_of_tile();
      find_maximum(correction);
      exponentiate(softmax, s_reg, sum, scale_log2);
    }
    consumer_release(keys);                                   // without it the producer waits for ever
    add(softmax, sum);
    if (follows) {
      wait_for_products<0>(o_reg);                            // without it O and P change beneath the product
      if (ends || !starts) consumer_release(values);          // without it the producer waits for ever
    }
    if (first) skip(values, skipped);
    if (follows) {
      if (ends) end_tile(ended, WHOLE, weight);
      if (!starts && (looked || again)) rescale(o_reg, correction);
    }
  };

  fill(o_reg, 0.f);
  fill(s_reg, 0.f);
  #pragma unroll 1
  while (next != NOTHING) {
    bool ends = false;                                        // a turn is left that has to end
    int skipped = 0;
    #pragma unroll 1
    for (;;) {
      skip_keys(skipped);
      begin_tile();
      skip_keys(before);
      skipped += before;
      bool starts = ONE_TEXT;                                 // whether the turn's first step has the text of the loop, and comes now
      if (!ONE_TEXT) step(AHEAD, AHEAD, AHEAD && ends, skipped);
      tile += !ONE_TEXT;                                      // that of the first step is done
      #pragma unroll 1
      for (; ONE_TEXT || tile <= last; ++tile) {
        step(true, starts, ONE_TEXT && ends, skipped);
        if (ONE_TEXT && tile == last) break;
        starts = ends = false;
      }
      consumer_release(queries);                              // without it the producer waits for ever
      if (next != DIRECTLY) break;
      ends = true;
      skipped = beyond;
    }
    consumer_wait(values);                                    // as in a step, all three
    to_operands(p_reg, s_reg);
    start_product(o_reg, p_reg, values.tile(), sums);
    sums = false;
    RowVec<16> weight;
    end_softmax(now, part, weight);
    wait_for_products<0>(o_reg);                              // as above, both
    consumer_release(values);                                 // as above
    for (; beyond > 0; --beyond) {
      skip_keys(1);
      skip(values, 1);
    }
    end_tile(now, part, weight);
  }
  if (PINGPONG && group == 0) wait_pingpong(group);           // without it the last one's word is left over
  if (TMA_STORE_OUT) wait_for_stores();                       // without it the block, and its shared memory, may end before
}

// After: each warp merges 16 rows and 32 columns of a query tile that blocks have shared, one part after the other.
//
//   for each part:  m' = max(m, lse_part);  O = e^(m - m') O + e^(lse_part - m') out_part;  l = e^(m - m') l + e^(lse_part - m');  m = m'
//   out = O / l,  lse = m + log l
KERNEL(THREADS, 1) fwd_hopper_combine(GRID_CONSTANT HopperForwardParams p) {
  if constexpr (SPLIT_KV) {
    constexpr int COLS = 32, ACROSS = WIDTH_V / COLS;
    constexpr int AT_ONCE = (REGISTERS - 64) / 16;            // parts on their way, as far as registers hold them
    const u32 own = block_id() * WARPS + warp_id(), fragment = own / ACROSS, fragments = p.partial_rows / 16, tile = fragment / fragments;
    if (tile >= u32(p.split_tiles)) return;
    const int row = int(fragment - tile * fragments) * 16, col0 = int(own - fragment * ACROSS) * COLS;

    Acc<16, COLS> o_reg;
    OnlineSoftmax<16> softmax;
    fill(o_reg, 0.f);
    const SplitRange splits = splits_of_tile(p, tile);
    for (u32 part = splits.first; part <= splits.last; part += AT_ONCE) {
      Acc<16, COLS> part_reg[AT_ONCE];
      RowVec<16> lse[AT_ONCE], correction, weight;
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {                     // all on their way before one is needed; the last one more than once
        const u32 number = min_of(part + i, splits.last);
        load(lse[i], p.lse_partials + number * p.partial_rows + row);
        load(part_reg[i], out_partial(p, number), row, col0);
      }
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (part + i > splits.last) break;
        join(softmax, lse[i], correction, weight);
        add(o_reg, correction, part_reg[i], weight);
      }
    }
    RowVec<16> lse;
    finalize(softmax, lse);
    rescale(o_reg, softmax.sum);

    const BlockCoord here = tile_coord(p, p.first_split_tile + tile, TILE_Q);
    store(rows_of(p.out, here.batch, here.head, here.row + row, p.len_q, p.dim_v), o_reg, col0);
    if (p.lse.data && col0 == 0) store(row_slice(p.lse, here.batch, here.head, here.row + row), p.lse.row_stride, p.len_q - here.row - row, lse);
  }
}

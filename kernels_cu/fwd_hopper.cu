// fwd_hopper.cu -- the forward of FlashAttention-2 for sm_90a: the loop of fwd_v2.cu, with TMA, products of whole
// warpgroups (wgmma) and each softmax beneath the products of its neighbours (FlashAttention-3: Shah et al., 2024).
//
//   A block stays and takes one query tile Q_i after the other. Its first warpgroup is the producer, each consumer owns 64 rows of Q_i:
//
//   producer: for each Q_i:  Q_i, K_0, K_1, V_0, K_2, V_1 ...                 in the order of use, as far ahead as there is room,
//                            the next K_0, V_last                             and the next Q_i ahead of these as far as there are stages
//
//   consumer: for each Q_i:
//               S = Q_i K_0^T;  P, m, l = softmax S                           beneath the last product of the tile before
//               for j = 1, 2 ...:
//                 start S = Q_i K_j^T                                         PINGPONG: one warpgroup after the other starts both
//                 start O = O + P V_{j-1}
//                 wait for S;  P' = 2^(S - m),  l = l + rows of P'            beneath the second product
//                 if P' is too large: S = Q_i K_j^T again, and P', m', l anew with the maximum of S    CAPPED: or a score is beyond the softcap
//                 wait for O;  O = 2^(m - m') O,  P = P'                      in most steps m stays. DROPOUT: of P' what is not dropped
//               O = O + P V_last
//               out_i = O / l,  lse_i = m + log l                             leaves while the next tile is computed. DROPOUT: scaled
//
//   TILE_LIST: of K_j only those of a list, which the producer reads; with the keys it tells the consumers which they are. FROM_LAST: where a linear term rises, the last first; where it bends, that at the diagonal.
//   STAGED_BIAS: with K_j comes the bias of both. STARTS_FROM_TERM: in most steps S starts from it, S = B_ij, S = S + Q_i K_j^T.
//   VARLEN, IN_TURN: Q_i of sequences, or those with most K_j first, as fwd_hopper_schedule lists them before. UNLISTED: each block has its own.
//   FP16_PARTS: Q, K, V and P are of float32, in two parts of float16 each, high and low, and a product is three, see tile/fp16_parts.cuh.
//   SPLIT_KV: tiles Q_i that would leave blocks idle are split along the keys: a split is some of the K_j, and fwd_hopper_combine makes one result of all.
#include "config.cuh"
#include "params.cuh"
#include "tile/combine.cuh"
#include "tile/forward_memory.cuh"
#include "tile/large_terms.cuh"
#include "tile/mask.cuh"
#include "tile/paged.cuh"
#include "tile/pipeline.cuh"
#include "tile/sinks.cuh"
#include "tile/softcap.cuh"
#include "tile/wgmma.cuh"
#include "tile/work.cuh"
enum NamedBarrier { VOTE = 1, TAKEN = 7, ORDER = 8 };         // of a warpgroup, on whether it redoes a step, and looks for a maximum in the next; of the warps that load; of ping-pong, for each warpgroup
static_assert(VOTE + GROUPS <= TAKEN && ORDER + GROUPS <= NAMED_BARRIERS);

KERNEL(THREADS, 1) fwd_hopper_schedule(GRID_CONSTANT WorkParams p) { // before: the query tiles that blocks take
  if constexpr (TAKES_TILES && !UNLISTED) schedule_queries(p);
}

KERNEL(THREADS, MIN_BLOCKS) fwd_hopper(GRID_CONSTANT WorkParams p) {
  const SharedAddress smem = shared_memory(); if constexpr (UNLISTED) if (!own_tile(p).exists()) return clear_rooms(p, warp_id(), WARPS); // rows that are no queries, or no split
  const int warp = int(uniform(u32(warp_id()))), group = warp / 4 - 1;
  Pipeline<KeyTile, STAGES, ELECT_ONE> keys{smem + K_OFFSET, smem + K_BARRIERS};
  Pipeline<ValueTile, STAGES_V, ELECT_ONE> values{smem + V_OFFSET, smem + V_BARRIERS};
  Queries queries{smem, smem + Q_BARRIERS};                   // those of the consumers, one after the other
  Clipping clipping{smem + CLIPPED_BARRIER}; Mask mask{p.mask, p.len_kv}; // VARLEN: of the sequence at hand

  if (warp == 0) {
    init_pipeline(keys, 4 * GROUPS, PRODUCER_ARRIVALS + (TERM_WARPS > 0)); // warps that hand a tile back
    init_pipeline(values, 4 * GROUPS, PRODUCER_ARRIVALS);
    init_pipeline(queries, SHARED_STAGES ? 4 * GROUPS : 4);
    if (VARLEN) { init_clipping(clipping); } init_terms(smem + TERMS_OFFSET);
  }
  sync_block();                                               // without it a warp arrives at a barrier that does not count yet

  if (group < 0) {
    warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    if constexpr (VARLEN) if (warp >= PRODUCER_WARPS) clear_rooms(p, warp - PRODUCER_WARPS, 4 - PRODUCER_WARPS);
    if (warp >= PRODUCER_WARPS) return bring_terms(keys, p, mask, smem + TERMS_OFFSET, warp - PRODUCER_WARPS);
    const bool leads = PRODUCER_WARPS == 1 || warp == 0;      // tells consumers, and brings queries
    u32 index = TAKES_TILES ? block_id() : 0, taken = 0;      // of the next query tile among those of the block; TAKES_TILES: its number, and the next one's
    WorkTile here{};                                          // the one begun last
    NBlockRange tiles{};                                      // its key tiles
    QueryLists lists{}; KeptQueryLists lists_of_keys{};       // TILE_LIST: those of them that are loaded, and those of the tile whose keys are
    int head_kv = 0, element = 0;                             // once a query tile: a division takes as long as some loads. CACHED: of keys, asked early
    Steps steps{}; KeyOrder order{};                          // LINEAR: what the term changes by from a key to the next; FROM_LAST: in which order key tiles come
    const auto begin_tile = [&] {
      here = work_tile_coord(p, index, TILE_Q);
      if constexpr (TAKES_TILES) taken = take_work_tile(p, warp, smem + CLIPPED_BARRIER + Mbarrier::bytes, TAKEN);
      head_kv = here.head / p.heads_per_kv; if constexpr (CACHED) element = element_of_cache(p, here.batch_number);
      if constexpr (LINEAR && !BENDS) steps = step_of_head(p, here);
      move_mask(mask, p, here), fill_last_tile(here);
      tiles = n_block_range(mask, here.row, min_of(TILE_Q, rows_at<QUERIES>(p, here).len() - here.row), TILE_KV, {0, 1});
      if (is_split(p, index, here)) tiles = clip_range(here.split.keys, tiles);
      if constexpr (TILE_LIST) lists = lists_of_queries(p, here.batch_number, here.head, here.row, ROWS, GROUPS), tiles = listed_range(lists, tiles);
      if constexpr (FROM_LAST) order = key_order(p, here, tiles, steps.before > 0.f, is_split(p, index, here));
    };
    u32 left = 0;                                             // key tiles that a consumer leaves unread, where it goes on directly: four bits for each
    // Queries and work of the consumers first ... end - 1.
    const auto load_queries = [&](int first, int end) {
      const bool follows = has_work_tile(p, TAKES_TILES ? taken : index + 1);
      #pragma unroll 1
      for (int of = first; of < end; ++of) {
        const WorkDescriptor work = describe_work(p, mask, index, here, tiles, order, lists, of, int(left >> 4 * of & 15), follows);
        left = (left & ~(15u << 4 * of)) | u32(work.next == DIRECTLY ? work.beyond : 0) << 4 * of;
        producer_acquire(queries);                            // without it queries are overwritten that are still read
        store_once(smem + WORK_OFFSET + queries.stage() * int(sizeof(WorkDescriptor)), work);
        store_sequence(smem + SEQUENCES_OFFSET + queries.stage() * int(sizeof(SequenceDescriptor)), mask, here);
        if constexpr (LINEAR) store_step(StoredSteps(smem + TERMS_OFFSET, queries.stage()), BENDS ? step_of_head(p, here) : steps);
        sync_warp();                                          // without it work is read that has not been written
        load_rows(queries, p.q_map, here, rows_at<QUERIES>(p, here).first() + here.row + of * ROWS);
      }
    };
    // Keys come just in time: whatever is done between a stage that becomes free and its load, the consumers wait for.
    TileCoord of_keys{}, of_values{};                         // whose head is that of keys
    PagePlaces pages{};                                       // PAGED: where keys of the next tiles are
    int tile = 0, end = 1, placed = 0, head = 0;              // of values, and beyond the last one of the query tile; at first there are none. COLUMNS: its head
    bool values_due = false, announced = false, further = false; // announced: queries of the next query tile are on their way; further: keys besides the first
    #pragma unroll 1
    for (;;) {
      const int following = TILE_LIST ? lists_of_keys.next(tile + 1, end) : tile + 1;
      const bool last = following == end;
      if (!announced && (following + LEAD >= end || (TILE_LIST && EARLY == GROUPS && further && announces_early(p, index, end - following))) && has_work_tile(p, index)) {
        begin_tile();
        if (leads) load_queries(0, values_due ? EARLY : GROUPS);
        announced = true;
      }
      const Pass pass{last, last && announced};
      if (pass.across) {
        of_keys = here, of_keys.head = head_kv, head = here.head; if constexpr (CACHED) of_keys.batch[BATCH_AXES - 1] = element;
        lists_of_keys = {lists};
      }
      const int next = pass.across ? tiles.begin : following, place = FROM_LAST ? place_of(order, tiles, next) : next;
      ColumnTerms columns;                                    // found before a stage is waited for, as the number of the key tile
      const Told told = pass.has_keys() ? lists_of_keys.tell(place, pass.across ? tiles.end : end) : Told{};
      if (PAGED && pass.has_keys()) {
        bring_pages(keys, values, clipping, p, of_keys, pages, place * TILE_KV, warp, pass.across);
      } else if (pass.has_keys()) {
        if constexpr (TERMS_BY_PRODUCER) find_columns(columns, p, of_keys, head, place * TILE_KV);
        producer_acquire(keys);                               // without it keys are overwritten that a slower warp still reads
        if constexpr (TILE_LIST) store_told(number_of(smem, keys.stage()), told);
        if constexpr (COLUMNS && VARLEN) store(StoredColumns(smem + TERMS_OFFSET, keys.stage()), columns);
        if constexpr (TILE_LIST) sync_warp();                 // without it a number is read that has not been written
        if constexpr (STAGED_BIAS) load_with_bias(keys, p, of_keys, head, rows_at<KEYS>(p, of_keys).first(), place * TILE_KV);
        else if constexpr (VARLEN) load_keys(keys, p, of_keys, place * TILE_KV);
        else if constexpr (TERMS_BY_PRODUCER) load_with_terms(keys, p.k_map, of_keys, place * TILE_KV, smem + TERMS_OFFSET, columns);
        else load_async(keys, p.k_map, of_keys.batch, of_keys.head, place * TILE_KV);
      }
      if (values_due) {
        const int row = (FROM_LAST ? placed : tile) * TILE_KV;
        if (!PAGED) producer_acquire(values);                 // without it values are overwritten that a slower warp still reads
        if constexpr (VARLEN && !PAGED) load_values(values, clipping, p, of_values, row);
        else if constexpr (!PAGED) load_async(values, p.v_map, of_values.batch, of_values.head, row);
        if (EARLY < GROUPS && pass.across && leads) load_queries(EARLY, GROUPS);
      }
      if (pass.is_end()) break;
      of_values = of_keys, values_due = true;
      tile = next, placed = place, further = !pass.across;
      if (pass.across) {
        end = tiles.end, announced = false;
        index = TAKES_TILES ? taken : index + 1;
      }
    }
    if constexpr (VARLEN && PRODUCER_WARPS == 4) clear_rooms(p, warp, 4); // no warp had nothing else to do
    return;
  }

  warpgroup_reg_alloc<CONSUMER_REGISTERS>();
  QueryTile q_smem; Acc<16, TILE_KV> s_reg; Acc<16, DIM_V> o_reg, own_reg; Acc<16, DIM_V>& pv_reg = OWN_SUMS ? own_reg : o_reg;
  OperandA<16> p_reg[P_OPERANDS]; PairDrawing<TILE_KV / 16> drawing{}; // P; DROPOUT: which pairs of it are kept
  OnlineSoftmax<16> softmax(LOWEST);
  float scale_log2 = EXPLICIT_SCORES ? 1.f : p.scale_log2, of_parts = 1.f; // FP16_PARTS: the scale of products, where scores are scaled one by one
  if constexpr (DROPOUT) drawing.dropout = seeded(p.scores);
  RowVec<16> terms_reg;                                       // WITH_TERMS: the rows' part of the term, in this key tile
  float common = 0.f, largest = LOWEST;                       // COLUMNS: what these have in common, and of all key tiles of the query tile so far
  u32 split = WHOLE, ended_split = WHOLE, number = 0;         // TILE_LIST: of the key tile, which `tile` only counts
  int tile, turned = 0, place = 0, last, before, beyond, whole_first, wholes, next = has_work_tile(p, TAKES_TILES ? block_id() : 0) ? LATER : NOTHING, warp_row;
  TileCoord now, ended;                                       // this query tile's, and that of the one before, which ends later than this begins
  HeadTerms terms{}; PackedRows<16> rows; LinearTerms line{}, ended_line{}; BendTerms<16> behind{}; // of the scores of this query tile, PACK_GQA of its rows; LINEAR: and of the one before
  const auto context = [&] { return score_context(p, now, now.head, terms, queries_of_sequence(p, now), keys_of_sequence(p, now)); };
  int others = group;                                         // stages filled for other consumers since this one's last
  const auto begin_tile = [&] {
    if (SHARED_STAGES) skip(queries, others);
    else queries.count += others;
    others = GROUPS - 1;
    q_smem = {uniform(queries.tile().base)};                  // once a query tile: dividing by STAGES_Q takes lanes
    consumer_wait(queries);                                   // without it the products read queries that have not arrived
    const WorkDescriptor work = load_shared<WorkDescriptor>(smem + WORK_OFFSET + queries.stage() * int(sizeof(WorkDescriptor)));
    ended = now;
    static_cast<BlockCoord&>(now) = {{0, 0, uniform(work.batch[0]), uniform(work.batch[1])}, uniform(work.head), uniform(work.row), 0};
    load_sequence(smem + SEQUENCES_OFFSET + queries.stage() * int(sizeof(SequenceDescriptor)), mask, now);
    if constexpr (CLEARS_QUERIES) clear_queries(q_smem, rows_at<QUERIES>(p, now).len() - group * ROWS, warp % 4);
    if (MODIFIED || DROPOUT || FP16_PARTS) now.batch_number = now.batch[BATCH_AXES - 2] * p.batch[BATCH_AXES - 1] + now.batch[BATCH_AXES - 1];
    if (SPLIT_KV) ended_split = ENDS_SPLITS ? split : WHOLE, split = uniform(work.split);
    tile = uniform(work.first);                               // and what follows is kept once for a warp
    if constexpr (FROM_LAST) turned = BENDS ? work.split != WHOLE ? tile : first_of_diagonal(p, now, queries_of_sequence(p, now), uniform(work.last)) : tile >> 31;
    last = uniform(work.last);
    before = TILE_LIST ? 0 : uniform(work.before), beyond = TILE_LIST ? 0 : uniform(work.beyond), next = uniform(work.next);
    if constexpr (TELLS_WHOLE) whole_first = uniform(work.whole_first), wholes = max_of(uniform(work.whole_end) - whole_first, 0);
    warp_row = now.row + group * ROWS + warp % 4 * 16;
    if constexpr (DROPOUT) drawing.begin_rows(now.batch_number * p.heads + now.head, warp_row);
    if constexpr (MODIFIED && PACK_GQA) find_rows(rows, p, now, mask, keys_of_sequence(p, now), warp_row);
    else if constexpr (MODIFIED) terms = head_terms(p, now, now.head, queries_of_sequence(p, now), keys_of_sequence(p, now));
    if constexpr (LINEAR) ended_line = line, line = linear_terms(context(), warp_row);
    if constexpr (BENDS) bend_terms(behind, context(), line, warp_row);
    if (SCORES == SCALED || SCALES_LARGE) scale_log2 = scale_of_head(p.scale_log2, terms);
    else if constexpr (FP16_PARTS > 0) (EXPLICIT_SCORES ? of_parts : scale_log2) = factors_of_head(p, now).scores * (EXPLICIT_SCORES ? p.scale : p.scale_log2);
  };
  // The softmax of a query tile, or of this split of it, has ended, and then its last product. VARLEN: rows count from the tile on, see `load_sequence`.
  const auto row_of_tile = [&] { return not_ahead(warp_id() - 4) * 16; };
  const auto row_of = [&](const TileCoord& here) { return (VARLEN ? 0 : here.row) + row_of_tile(); };
  const auto end_softmax = [&](const TileCoord& here, const LinearTerms& line, u32 split, RowVec<16>& weight) {
    RowVec<16> lse, correction;
    if (COLUMNS) count_largest(softmax, largest);
    if (LINEAR) count_rows(softmax, line);
    if (SINKS != NO_SINKS && split == WHOLE) join_sinks(softmax, correction, p, mask, here.head, (VARLEN && PACK_GQA ? here.row : 0) + row_of(here));  // of splits, when they are combined
    finalize(softmax, lse), weight = softmax.sum;
    if (SINKS != NO_SINKS && split == WHOLE) multiply(weight, correction);
    if constexpr (DROPOUT) scale(weight, drawing.dropout.scale);
    if constexpr (FP16_PARTS > 0) scale(weight, factors_of_head(p, here).values);
    if (split != WHOLE) store(p.lse_partials + split * p.partial_rows + row_of_tile(), 1, p.partial_rows - row_of_tile(), lse);
    else if (INNER_HEADS > 1 && p.lse.data) store(lse_of_heads(p, here, row_of(here)), lse);
    else if (p.lse.data) store(lse_rows(p, here, row_of(here)), p.lse.row_stride, rows_at<QUERIES>(p, here).len() - row_of(here), lse);
    softmax = OnlineSoftmax<16>(LOWEST);
  };
  const auto end_tile = [&](const TileCoord& here, u32 split, const RowVec<16>& weight) {
    rescale(o_reg, weight);
    if (split != WHOLE && row_of_tile() < (VARLEN ? rows_at<QUERIES>(p, here).len() : p.partial_rows)) store(out_partial(p, split), o_reg, row_of_tile(), 0);
    if (split != WHOLE) return;
    if constexpr (TMA_STORE_OUT) store_out_async(p.out_map, here, row_of(here), smem, o_reg);
    else store(out_rows(p, here, row_of(here)), o_reg);
  };
  const auto key_tile = [&] { return TILE_LIST ? told_number(number) : FROM_LAST && BENDS ? place : FROM_LAST ? place_of(turned, tile, false) : tile; };
  const auto first_key = [&] { return key_tile() * TILE_KV; }; using Arrays = PairArrays<16, TILE_KV>;
  const auto load_arrays = [&](Arrays& arrays, const KeyTile& k_smem) {
    if constexpr (MODIFIED && PACK_GQA) load_packed(arrays, rows, keys_of_sequence(p, now), first_key());
    else if constexpr (MODIFIED) load<false>(arrays, context(), k_smem, STARTS_FROM_TERM ? (warp - 4) * 16 : row_of_tile(), warp_row, first_key(), !PAIR_BITS || told_to_ask(number));
  };
  const auto modify = [&](const Arrays& arrays, const bool asks) {
    if (EXPLICIT_SCORES) scale_scores(s_reg, FP16_PARTS ? of_parts : p.scale, p.softcap);
    if constexpr (MODIFIED && PACK_GQA) modify_packed_scores(s_reg, arrays, rows, p, now, mask, keys_of_sequence(p, now), first_key(), asks);
    else if constexpr (MODIFIED) modify_scores<false, true>(s_reg, arrays, context(), warp_row, first_key(), asks);
  };
  // Whether all of these rows see all keys of the tile.
  const auto whole = [&](int row, int rows) {
    return PAIR_BITS || (TELLS_WHOLE ? u32(key_tile() - whole_first) < u32(wholes) : unmasked_keys(mask, row, rows).contains(first_key(), TILE_KV));
  };
  const auto all_seen = [&] { return whole(now.row + group * ROWS, ROWS); }; // by all rows of the warpgroup
  const auto mask_scores = [&] {
    if (!whole(warp_row, 16)) apply_mask(s_reg, mask, warp_row, first_key(), masked_score(terms));
    if constexpr (SCALES_LARGE) scale_as_before(s_reg, scale_log2, p.scale_log2);
  };
  bool sums = false;                                          // O holds products of its query tile; if not, the next one replaces what it holds
  Choose<KEPT_ONCE, u32, bool> looks_again = false;           // for the maximum: see `unsettled`, `beyond_polynomial`; a redo costs a product
  RegisterPair offsets{};                                     // of the rows' exponents, for the maximum so far; WITH_TERMS: in this key tile
  // VARLEN: rows that are no queries have no say in that, or what they hold would decide the bits of others.
  const auto queries_left = [&] { return rows_at<QUERIES>(p, now).len() - row_of_tile(); };
  const auto find_maximum = [&](RowVec<16>& correction) {
    raise(softmax, s_reg, correction, scale_log2, terms_reg);
    if constexpr (SCALES_LARGE) scale_where_large(s_reg, softmax, scale_log2);
    if constexpr (VARLEN) if (queries_left() < 16) fill_from(softmax.max, queries_left(), 0.f), fill_from(correction, queries_left(), 1.f);
    offsets = exponent_offsets(softmax, terms_reg, p.heads);
  };
  const auto to_weights = [&](RowVec<16>& sum, const bool near = false) { // near: CAPPED, of products as they are
    if (near) exponentiate_capped(offsets, s_reg, sum, p.cap); else exponentiate(offsets, s_reg, sum, scale_log2);
    if constexpr (VARLEN && !CLEARS_QUERIES) fill_from(sum, queries_left(), 0.f);
  };
  // With ping-pong, a warpgroup lets the next one go for a tile that it does not need as well: all of them count the same tiles.
  if (PINGPONG && group == GROUPS - 1) arrive_pingpong<ORDER>(group, GROUPS); // without it nobody begins
  const auto skip_keys = [&](int tiles) {
    #pragma unroll 1
    for (; PINGPONG && tiles > 0; --tiles) {
      wait_pingpong<ORDER>(group);                            // without it the order is lost: the next one goes before its time
      arrive_pingpong<ORDER>(group, GROUPS);                  // without it the next warpgroup waits for ever
      skip(keys, 1);
    }
    if (!PINGPONG) skip(keys, tiles);
  };
  const auto pack_late = [&] { if constexpr (DROPS_LATE) drawing.find_kept(first_key()); if constexpr (PACKS_LATE) to_operands(p_reg, s_reg, drawing.kept); };
  // One key tile: its product and its softmax, and beneath both the second product, O += P V, of the key tile before. What is usual, P with the maximum
  // of the key tiles before, stands in one piece, and the rest, with that of this one, behind it: instructions after a jump have to be waited for.
  const auto step = [&](const Step kind, const int skipped) {
    const bool follows = kind.follows, starts = kind.starts, ends = kind.ends;
    const KeyTile k_smem = keys.tile();
    const bool real = ends || !starts || ValueTile::bytes > KeyTile::bytes;
    if (follows && !PACKS_LATE) to_operands(p_reg, s_reg, drawing.kept);
    consumer_wait(keys);                                      // without it the product reads keys that have not arrived
    if constexpr (TILE_LIST) number = uniform(load_shared<u32>(number_of(smem, keys.stage(), group)));
    if constexpr (FROM_LAST && BENDS) place = place_of(turned, tile, !follows || starts); // once
    const StoredTerms stored(smem + TERMS_OFFSET, LINEAR ? int(q_smem.base - smem) / QueryTile::bytes : keys.stage(), behind.is_beyond(key_tile()));
    if constexpr (COLUMNS) common = load_common(stored);
    Arrays arrays;
    const bool first = !follows || starts, from_term = STARTS_FROM_TERM && !first && !looks_again && !(TILE_LIST && told_to_ask(number)), finds_term = STAGED_BIAS ? STARTS_FROM_TERM && (ONE_TEXT || !first) : from_term;
    if (finds_term) load_arrays(arrays, k_smem), begin_with_key_terms(s_reg, stored), modify(arrays, false); // a staged bias also in vain: a jump would cost more
    if (PINGPONG) wait_pingpong<ORDER>(group);                // without it products of several warpgroups queue, and no scores are done soon
    start_scores(s_reg, q_smem, k_smem, stored, from_term);
    RowVec<16> weight;
    if (follows) {
      if (real) consumer_wait(values);                        // without it the product reads values that have not arrived
      start_product(pv_reg, p_reg, real ? values.tile() : ValueTile{k_smem.base}, sums && !OWN_SUMS);
      sums = !starts;
    }
    if (PINGPONG) arrive_pingpong<ORDER>(group, GROUPS);      // without it the next warpgroup waits for ever
    if (ARRAYS_AHEAD && !STARTS_FROM_TERM) load_arrays(arrays, k_smem);
    if (follows && ends) end_softmax(ended, ended_line, ended_split, weight);
    if (COLUMNS) leave_out_largest(softmax, terms_reg, common, largest);
    if (LINEAR) terms_of_tile(terms_reg, s_reg, line, behind, key_tile());
    if (WITH_TERMS) offsets = exponent_offsets(softmax, terms_reg, p.heads);
    if (follows) wait_for_products<1>(s_reg);                 // without it scores are read that do not exist yet
    else wait_for_products<0>(s_reg);                         // the same
    if (!ARRAYS_AHEAD && !STARTS_FROM_TERM) load_arrays(arrays, k_smem);
    RowVec<16> correction, sum;
    const bool asks = !TILE_LIST || told_to_ask(number), usual = !first && !looks_again && !(TILE_LIST && asks) && !behind.is_across(key_tile()) && (!CAPPED || all_seen());
    if (usual) {
      if constexpr (!CAPPED) { if (!from_term) modify(arrays, !TILE_LIST); mask_scores(); }
      if constexpr (DROPOUT) drawing.draw(first_key(), !DROPS_LATE);
      to_weights(sum, CAPPED);
      if (!warpgroup_any(VOTE + group, too_large(sum))) {
        consumer_release(keys);                               // without it the producer waits for ever
        add(softmax, sum);
        wait_for_products<0>(pv_reg);                         // without it O and P change beneath the product
        consumer_release(values);                             // without it the producer waits for ever
        promote(o_reg, pv_reg), pack_late();
        return;
      }
      start_scores(s_reg, q_smem, k_smem, stored);            // the maximum so far was too small: S once more, and P with the maximum of S
      wait_for_products<0>(s_reg);                            // without it scores are read that do not exist yet
      if (!STARTS_FROM_TERM) load_arrays(arrays, k_smem);
    }
    if (STARTS_FROM_TERM) warp_row = not_ahead(warp_row), HAS_KEY_TERM ? void() : load_arrays(arrays, k_smem); // what rows have, found again: kept, it would spill
    // CAPPED: whether the next step is a usual one. What masks hide has no say in that.
    const Regs<bool, 1> beyond = CAPPED && !first && !(TILE_LIST && asks) && all_seen() ? beyond_polynomial(s_reg, VARLEN ? queries_left() : 16, p.cap) : none();
    if constexpr (HAS_KEY_TERM) add_bias_and_terms(s_reg, k_smem, stored, context(), (warp - 4) * 16); else modify(arrays, asks);
    if (behind.is_across(key_tile())) bend_scores<false>(s_reg, context(), warp_row, first_key());
    if (TILE_LIST && first && told_none(number)) fill(s_reg, masked_score(terms)), stay_apart();
    mask_scores();
    if (LINEAR && VARLEN) terms_of_tile(terms_reg, s_reg, line, behind, not_ahead(key_tile())); // again: kept, they would spill
    find_maximum(correction);
    if constexpr (DROPOUT) if (!usual) drawing.draw(first_key(), !DROPS_LATE);
    to_weights(sum);
    const bool rises = MODIFIED && looks_again && !first, settled = !MODIFIED && !VARLEN && !CAPPED && all_seen();
    const bool again = (MODIFIED && usual) || (!settled && warpgroup_any(VOTE + group, either(unsettled<STARTS_FROM_TERM>(softmax, correction, rises), beyond)));
    looks_again = KEPT_ONCE ? uniform(u32(again)) : u32(again);
    consumer_release(keys);                                   // without it the producer waits for ever
    add(softmax, sum);
    if (follows) {
      wait_for_products<0>(pv_reg);                           // without it O and P change beneath the product
      if (ends || !starts) consumer_release(values), promote(o_reg, pv_reg); // without it the producer waits for ever
    }
    pack_late();
    if (first) skip(values, skipped);
    if (follows && ends) end_tile(ended, ended_split, weight), clear(o_reg);
    if (follows && !starts) rescale(o_reg, correction);
  };
  // OWN_LISTS: key tiles that the warpgroup sees nothing of. What is left to do is the product of the one before, and P of the last one is zero.
  const auto pass_by = [&] {
    if (!PACKS_LATE) to_operands(p_reg, s_reg, drawing.kept);
    if (PINGPONG) wait_pingpong<ORDER>(group);                // without it the order is lost: the next one goes before its time
    consumer_wait(values);                                    // without it the product reads values that have not arrived
    start_product(pv_reg, p_reg, values.tile(), sums && !OWN_SUMS), sums = true;
    if (PINGPONG) arrive_pingpong<ORDER>(group, GROUPS);      // without it the next warpgroup waits for ever
    consumer_wait(keys);                                      // without it the number is that of keys before
    number = uniform(load_shared<u32>(number_of(smem, keys.stage(), group)));
    consumer_release(keys);                                   // without it the producer waits for ever
    wait_for_products<0>(pv_reg);                             // without it O and P change beneath the product
    consumer_release(values);                                 // without it the producer waits for ever
    fill(s_reg, 0.f), pack_late();
    #pragma unroll 1
    for (; tile < last && told_next_none(number); ++tile) {
      consumer_wait(keys);                                    // the same
      number = uniform(load_shared<u32>(number_of(smem, keys.stage(), group))), skip_keys(1), skip(values, 1);
    }
  };
  fill(o_reg, 0.f), fill(pv_reg, 0.f), fill(s_reg, 0.f);
  #pragma unroll 1
  while (next != NOTHING) {
    bool ends = false; int skipped = 0;                       // a query tile is left that has to end
    #pragma unroll 1
    for (;;) {
      skip_keys(skipped);
      begin_tile();
      skip_keys(before);
      skipped += before;
      bool starts = ONE_TEXT;                                 // whether the tile's first step has the text of the loop, and comes now
      if (!ONE_TEXT) step(AHEAD ? Step::across(ends) : Step::alone(), skipped);
      tile += !ONE_TEXT;                                      // that of the first step is done
      #pragma unroll 1
      for (; ONE_TEXT || tile <= last; ++tile) {
        if constexpr (OWN_LISTS) if (told_next_none(number)) { pass_by(); continue; }
        step({true, starts, ONE_TEXT && ends}, skipped);      // across, once, if it has the text of the loop; within
        if (ONE_TEXT && tile == last) break;
        starts = ends = false;
      }
      if (OWN_LISTS || (MODIFIED && GROUPS == 4 && (!WITH_TERMS || (VARLEN && LINEAR && WIDTH > 32))) || FOUR_CAPPED) queries.count = u32(not_ahead(int(queries.count))); // its address is found again: kept, it would spill
      consumer_release(queries);                              // without it the producer waits for ever
      if (next != DIRECTLY) break;
      ends = true, skipped = beyond;
    }
    consumer_wait(values);                                    // without it the product reads values that have not arrived
    if (!PACKS_LATE) to_operands(p_reg, s_reg, drawing.kept);
    start_product(pv_reg, p_reg, values.tile(), sums && !OWN_SUMS), sums = false;
    RowVec<16> weight;
    end_softmax(now, line, split, weight);
    wait_for_products<0>(pv_reg);                             // without it O is stored before the product has ended
    consumer_release(values);                                 // without it the producer waits for ever
    for (; beyond > 0; --beyond) skip_keys(1), skip(values, 1);
    promote(o_reg, pv_reg), end_tile(now, split, weight), clear(o_reg);
  }
  if (PINGPONG && group == 0) wait_pingpong<ORDER>(group);    // without it the last one's arrival is left over
  if (TMA_STORE_OUT) wait_for_stores();                       // without it the block, and its shared memory, may end before
}

// After: the splits of query tiles become one.
KERNEL(THREADS, 1) fwd_hopper_combine(GRID_CONSTANT WorkParams p) {
  if constexpr (SPLIT_KV) combine_splits<(REGISTERS - 64) / 16>(p); // on their way, as far as registers hold them
}

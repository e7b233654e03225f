// sequence_sums.cuh -- the same as score_sums.cuh where batch elements have lengths of their own (VARLEN): a unit is still a tile of queries and of
// keys, counted from the first ones of each sequence, and which tiles there are is found when the kernel runs. A block walks an array of entries,
// and so splits share it: a head and a query tile of some sequence, or where elements belong to queries, a head and a sequence.
#pragma once
#include "tile/element_sums.cuh"

// Whether entries are the tiles of all packed sequences. Otherwise each sequence has as many as the longest one might need.
OP bool lists_packed_tiles(const ScoreGradientParams& p) { return p.batch_summed[BATCH_AXES - 1] > 1 && offsets_of<QUERIES>(p); }

template <typename Params> struct SequenceCursor : PairCursor {
  u32 entry;                                                  // `left` counts those that are left, this one included
  int unit_q, unit_kv;                                        // tiles of the unit
  int q_end, kv_end;                                          // behind the last tiles of the entry, and of its query tile
  Sequence<Params> seq;

  OP const Sequence<Params>& sequence(const Params&) const { return seq; }
  OP void enter(const Params& p) {
    const int sequences = p.batch_summed[BATCH_AXES - 1];
    u32 rest = entry, number = 0;
    if (OF_QUERY) {
      number = take(rest, sequences);
      q_tile = unit_q;
    } else if (lists_packed_tiles(p)) {
      const int row = row_in_sequence<QUERIES>(p, take(rest, tiles_of<QUERIES>(p)), number);
      q_tile = row < 0 ? 1 << 24 : row / TILE_Q;              // one that no sequence has
    } else {
      q_tile = take(rest, ceil_div(p.len_q, TILE_Q));
      number = take(rest, sequences);
    }
    head = first_head + int(rest);
    batch[BATCH_AXES - 1] = first_batch[BATCH_AXES - 1] + int(number);
    seq = sequence_of(p, batch[BATCH_AXES - 1]);
    const int tiles = ceil_div(seq.q.len(), TILE_Q);
    const bool has_rest = CLAMPED && OF_QUERY && unit_q == unit_tiles<QUERIES>(p) - 1;
    q_end = has_rest ? tiles : min_of(q_tile + 1, tiles);
  }
  // The first pair of tiles from here on of which any pair takes part.
  OP void find(const Params& p) {
    #pragma unroll 1
    for (;;) {
      #pragma unroll 1
      for (; q_tile < q_end; ++q_tile) {
        const int row = q_tile * TILE_Q;
        const ColumnRange keys = visible_keys(mask_of(seq), row, min_of(TILE_Q, seq.q.len() - row));
        kv_tile = keys.first / TILE_KV;
        kv_end = keys.last < keys.first ? 0 : keys.last / TILE_KV + 1;
        const int own = OF_DISTANCE ? unit_kv + DIAGONAL_STEP * q_tile : unit_kv;
        if (HAS_COLS) kv_tile = max_of(kv_tile, own);
        if (HAS_COLS && !(CLAMPED && OF_KEY && own == unit_tiles<KEYS>(p) - 1)) kv_end = min_of(kv_end, own + 1);
        if (kv_tile < kv_end) return;
      }
      if (--left <= 0) return;
      ++entry;
      enter(p);
    }
  }
  OP void advance(const Params& p) {
    if (++kv_tile < kv_end) return;
    ++q_tile;
    find(p);
  }
};
template <typename Params> OP void find_first(SequenceCursor<Params>& at, const Params& p, u32 unit_number, u32 split) {
  static_cast<PairCursor&>(at) = unit_of(p, unit_number);
  at.unit_q = at.q_tile, at.unit_kv = at.kv_tile;
  const i64 sequences = p.batch_summed[BATCH_AXES - 1];
  i64 entries = p.heads_summed;
  entries *= OF_QUERY ? sequences : lists_packed_tiles(p) ? tiles_of<QUERIES>(p) : sequences * ceil_div(p.len_q, TILE_Q);
  const i64 first = entries * split / p.splits;
  at.entry = u32(first);
  at.left = entries * (split + 1) / p.splits - first;
  if (at.left <= 0) return;
  at.enter(p);
  at.find(p);
}
using Cursor = Choose<VARLEN, SequenceCursor<ScoreGradientParams>, PairCursor>;
OP Cursor first_pair(const ScoreGradientParams& p, u32 unit_number, u32 split) {
  Cursor at;
  find_first(at, p, unit_number, split);
  return at;
}

// The backward's tiles of a sequence are counted as its own, of so many rows.
template <typename Params> OP void load_stats_async(SharedAddress to, const Params& p, const SequenceCursor<Params>& at) {
  const SequenceRows& q = at.seq.q;
  const FastDivmod& rows = p.stats_rows_divmod;
  const int begun = int(divide(q.first(), rows)), filled = int(divide(p.len_q, rows)), number = at.batch[BATCH_AXES - 1];
  const bool is_packed = offsets_of<QUERIES>(p);
  const int tiles_of_head = is_packed ? filled + p.sequences.sequences + 1 : ceil_div(p.len_q, int(rows.divisor));
  const i64 first_tile = i64(q.batch_number() * p.heads + at.head) * tiles_of_head + (is_packed ? begun + number : 0);
  load_stats_async(to, p, first_tile, ceil_div(q.len(), int(rows.divisor)), at.q_tile);
}

// CLAMPED: the shares of pairs beyond the last element belong to that, as they have read it. Columns from `last` on are added to column `target`.
template <int M, int N> OP void fold_columns(Acc<M, N>& acc, int last, int target) {
  RowVec<M> sums;
  fill(sums, 0.f);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) {
      if (acc.col(l, r) < last) continue;
      sums.at(l, acc.slot(r)) += acc.at(l, r);
      acc.at(l, r) = 0.f;
    }
  }
  quad_reduce(sums, [](float a, float b) { return a + b; });
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r)
      if (acc.col(l, r) == target) acc.at(l, r) = sums.at(l, acc.slot(r));
  }
}
// The same of rows, which are dealt out to the warps of a block: this one has those from row0 on.
constexpr int FOLDED_BYTES = VARLEN ? WARPS * TILE_KV * int(sizeof(float)) : 0;
template <int M, int N> OP void fold_rows(Acc<M, N>& acc, SharedAddress smem, int row0, int last, int target) {
  ColVec<N> sums;
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < sums.slots; ++i) sums.at(l, i) = 0.f;
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) {
      if (row0 + acc.row(l, r) < last) continue;
      sums.at(l, acc.col_slot(r)) += acc.at(l, r);
      acc.at(l, r) = 0.f;
    }
  }
  reduce_lanes<32, 4>(sums, [](float a, float b) { return a + b; });
  const SharedAddress own = smem + warp_id() * N * int(sizeof(float));
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < sums.slots; ++i)
      if (l < 4) store_shared(own + sums.col(l, i) * int(sizeof(float)), sums.at(l, i));
  }
  sync_block();                                               // without it sums are read that have not been written; those of the next
                                                              // step wait for the barrier that this begins with
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) {
      if (row0 + acc.row(l, r) != target) continue;
      for (int warp = 0; warp < WARPS; ++warp) acc.at(l, r) += load_shared<float>(smem + (warp * N + acc.col(l, r)) * int(sizeof(float)));
    }
  }
}
template <int M, int N, typename AnyCursor>
OP void fold(Acc<M, N>& acc, SharedAddress smem, const ScoreGradientParams& p, const AnyCursor& at, int row0) {
  const int last_key = elements_of<KEYS>(p) - 1, last_query = elements_of<QUERIES>(p) - 1;
  if (OF_KEY && (at.kv_tile + 1) * TILE_KV > last_key + 1) fold_columns(acc, last_key - at.kv_tile * TILE_KV, last_key - at.unit_kv * TILE_KV);
  if (OF_QUERY && (at.q_tile + 1) * TILE_Q > last_query + 1) fold_rows(acc, smem, row0, last_query - at.q_tile * TILE_Q, last_query - at.unit_q * TILE_Q);
}

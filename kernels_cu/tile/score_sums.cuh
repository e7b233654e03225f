// score_sums.cuh -- the gradient of an array that scores read: which pairs share an element, what each of them adds to it, and how that is
// summed up in an order that is always the same.
//
// What a block sums up is a unit: the elements that belong to one batch element, one head, the queries of a tile and the keys of a tile, or to
// those of them that the array has (OF_QUERY, OF_KEY). Along what it does not have, the block sums over all, or over its part of them: `splits`
// blocks share a unit. Sums are of whole tiles and stay in registers, so that rows and columns are added up once, at the end. Where elements
// belong to distances (OF_DISTANCE), a unit is the tiles on one diagonal: what is in one place of them is equally far apart.
#pragma once
#include "tile/accum.cuh"
#include "tile/copy.cuh"
#include "tile/gradient.cuh"
#include "tile/score.cuh"
#include "tile/sequence.cuh"

constexpr bool HAS_ROWS = OF_QUERY || OF_DISTANCE, HAS_COLS = OF_KEY || OF_DISTANCE;          // whether a unit tells them apart
constexpr int UNIT_SUMS = (HAS_ROWS ? TILE_Q : 1) * (HAS_COLS ? TILE_KV : 1);
constexpr int PARTS_OF_BLOCK = HAS_ROWS ? 1 : WARPS - PRODUCERS; // rows are dealt out to warps, each of which has a sum of its own where they share one

constexpr int DIAGONAL_STEP = TILE_Q / TILE_KV;                // key tiles to the next query tile on a diagonal
static_assert(TILE_Q % TILE_KV == 0);

template <> OP double from_float<double>(float x) { return x; }

// How many queries or keys elements may belong to.
template <Side SIDE> OP int elements_of(const ScoreGradientParams& p) {
  if constexpr (VARLEN) return SIDE == QUERIES ? p.elements_q : p.elements_kv;
  else return rows_of_array<SIDE>(p);
}
template <Side SIDE> OP int unit_tiles(const ScoreGradientParams& p) { return ceil_div(elements_of<SIDE>(p), TILE_ROWS<SIDE>); }

// The part of units that a block takes after this one: of as many as there are blocks, the next place in each round, and not the same. That one
// would often be about as far from the diagonal, so that under a mask some blocks had much more to do than others.
OP u32 part_after(u32 part) {
  const u32 own = part % blocks();
  return part - own + blocks() + (own + 1 < blocks() ? own + 1 : 0);
}

template <typename Seq> OP Mask mask_of(const Seq& seq) { return {seq.mask(), seq.kv.len()}; }

// The pairs of tiles that a block sums over, one after the other: those of its first head, then those of the next, and so on.
struct PairCursor {
  int batch[BATCH_AXES];
  int head, q_tile, kv_tile;
  int first_batch[BATCH_AXES], first_head;                    // of the unit
  i64 left;                                                   // how many are left, this one included

  OP u32 batch_number(const ScoreGradientParams& p) const {
    u32 number = 0;
    #pragma unroll
    for (int i = 0; i < BATCH_AXES; ++i) number = number * p.batch[i] + batch[i];
    return number;
  }
  template <typename Params> OP UniformSequence<Params> sequence(const Params& p) const { return {{p, 0}, {p, 0}}; }
  OP bool visible(const Mask& mask) const {
    if (OF_DISTANCE && (kv_tile < 0 || kv_tile * TILE_KV >= mask.len_kv)) return false;
    return visible_keys(mask, q_tile * TILE_Q, TILE_Q).overlaps(kv_tile * TILE_KV, TILE_KV);
  }
  OP void step(const ScoreGradientParams& p) {
    --left;
    if (!HAS_COLS) {
      if (++kv_tile < ceil_div(p.len_kv, TILE_KV)) return;
      kv_tile = 0;
    }
    if (!OF_QUERY) {
      const int tiles = ceil_div(p.len_q, TILE_Q);
      if (OF_DISTANCE) kv_tile += DIAGONAL_STEP;
      if (++q_tile < tiles) return;
      q_tile = 0;
      if (OF_DISTANCE) kv_tile -= DIAGONAL_STEP * tiles;
    }
    if (++head < first_head + p.heads_summed) return;
    head = first_head;
    #pragma unroll
    for (int i = BATCH_AXES - 1; i >= 0; --i) {
      if (++batch[i] < first_batch[i] + p.batch_summed[i]) return;
      batch[i] = first_batch[i];
    }
  }
  // To the next one of which any pair takes part.
  OP void advance(const ScoreGradientParams& p) {
    do step(p);
    while (left > 0 && !visible({p.mask, p.len_kv}));
  }
};

// the next number below `size` from all that are left
template <typename T> OP int take(T& rest, int size) {
  const int number = int(rest % size);
  rest /= size;
  return number;
}

// The first batch element and the first head of those that share elements, by number. The cursor walks nowhere.
OP PairCursor owner_of(const ScoreGradientParams& p, u32 rest) {
  PairCursor owner;
  owner.kv_tile = owner.q_tile = 0;
  owner.head = owner.first_head = take(rest, p.heads / p.heads_summed) * p.heads_summed;
  #pragma unroll
  for (int i = BATCH_AXES - 1; i >= 0; --i) owner.batch[i] = owner.first_batch[i] = take(rest, p.batch[i] / p.batch_summed[i]);
  owner.left = 0;
  return owner;
}
OP u32 owners(const ScoreGradientParams& p) {
  u32 number = p.heads / p.heads_summed;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) number *= p.batch[i] / p.batch_summed[i];
  return number;
}
// the diagonals of an owner, the first of which has the last queries and the first keys
OP int diagonals(const ScoreGradientParams& p) { return ceil_div(p.len_kv, TILE_KV) + DIAGONAL_STEP * (ceil_div(p.len_q, TILE_Q) - 1); }

// Where a unit begins.
OP PairCursor unit_of(const ScoreGradientParams& p, u32 number) {
  u32 rest = number;
  const int kv_tile = OF_KEY ? take(rest, unit_tiles<KEYS>(p)) : 0, q_tile = OF_QUERY ? take(rest, unit_tiles<QUERIES>(p)) : 0;
  const int diagonal = OF_DISTANCE ? take(rest, diagonals(p)) - DIAGONAL_STEP * (ceil_div(p.len_q, TILE_Q) - 1) : 0;
  PairCursor unit = owner_of(p, rest);
  unit.kv_tile = kv_tile + diagonal, unit.q_tile = q_tile;
  return unit;
}

// The first pair of tiles of a block's part of a unit.
OP void find_first(PairCursor& at, const ScoreGradientParams& p, u32 unit_number, u32 split) {
  at = unit_of(p, unit_number);
  i64 count = p.heads_summed;
  #pragma unroll
  for (int i = 0; i < BATCH_AXES; ++i) count *= p.batch_summed[i];
  if (!HAS_COLS) count *= ceil_div(p.len_kv, TILE_KV);
  if (!OF_QUERY) count *= ceil_div(p.len_q, TILE_Q);
  i64 rest = count * split / p.splits;
  at.left = count * (split + 1) / p.splits - rest;
  if (!HAS_COLS) at.kv_tile = take(rest, ceil_div(p.len_kv, TILE_KV));
  if (!OF_QUERY) at.q_tile = take(rest, ceil_div(p.len_q, TILE_Q));
  if (OF_DISTANCE) at.kv_tile += DIAGONAL_STEP * at.q_tile;
  at.head += take(rest, p.heads_summed);
  #pragma unroll
  for (int i = BATCH_AXES - 1; i >= 0; --i) at.batch[i] += take(rest, p.batch_summed[i]);
  if (at.left > 0 && !at.visible({p.mask, p.len_kv})) {
    if (OF_QUERY && OF_KEY) at.left = 0;                      // nor is any pair of these tiles in another head
    else at.advance(p);
  }
}

// lse and delta of the rows of a tile, from where the backward's own tiles have them, to TILE_Q words each. Asynchronous like the tiles.
// `first_tile` is the number of the first one of so many of a head.
OP void load_stats_async(SharedAddress to, const ScoreGradientParams& p, i64 first_tile, int tiles, int q_tile) {
  const int rows = int(p.stats_rows_divmod.divisor);
  for_lane(l) {
    const int i = Block::thread(l) * 4, row = q_tile * TILE_Q + i % TILE_Q, tile = int(divide(row, p.stats_rows_divmod));
    if (i < 2 * TILE_Q) {
      const float* const from = p.stats + ((first_tile + tile) * STATS + i / TILE_Q) * rows + (row - tile * rows);
      const bool exists = tile < tiles;
      if constexpr (ARCH >= 80) {
        cp_async<16>(to + i * 4, from, !exists);
      } else {
        if (exists) count_read(16);
        store_shared(to + i * 4, exists ? *reinterpret_cast<const Vector<16>*>(from) : Vector<16>{});
      }
    }
  }
}
OP void load_stats_async(SharedAddress to, const ScoreGradientParams& p, const PairCursor& at) {
  const int tiles = int(divide(p.len_q - 1, p.stats_rows_divmod)) + 1;
  load_stats_async(to, p, i64(at.batch_number(p) * p.heads + at.head) * tiles, tiles, at.q_tile);
}
// rows = sign * src[row0 : row0 + M], in shared memory
template <int M> OP void load_rows(RowVec<M>& rows, SharedAddress src, int row0, float sign = 1.f) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < rows.slots; ++i) rows.at(l, i) = sign * load_shared<float>(src + (row0 + rows.row(l, i)) * 4);
  }
}

// PLUS_LINEAR: statistics become what is subtracted from the scores of a tile; a backward's tile has so many rows.
template <int M> OP void make_whole(RowVec<M>& lse, const RowVec<M>& terms, const ScoreContext& x, int row0, int rows) {
  for_lane(l) for (int i = 0; i < lse.slots; ++i) lse.at(l, i) += part_of_query(per_query_of(x) * LOG2E, row0 + lse.row(l, i), rows) - terms.at(l, i);
}

// The element of an array without gaps that an expression reads; an index beyond an axis is taken for the nearest one.
template <typename... Index> OP i64 place_in(const ScoreContext& x, int number, Index... index) {
  const CapturedArray& array = x.of.captured[number];
  i64 place = 0;
  int axis = 0;
  ((place = place * array.extent[axis] + max_of(min_of(index, array.extent[axis] - 1), 0), ++axis), ...);
  return place;
}

// A pair that is in no fragment.
OP PairPlace place_at(int q_idx, int kv_idx) { return {false, q_idx, kv_idx, float(q_idx), float(kv_idx), 0.f, 0.f, true}; }

// What rows of queries see, of which the last ones may not exist.
struct ExistingPairs {
  Mask mask;
  int len_q;
};
OP ColumnRange visible_in_row(const ExistingPairs& pairs, int row) { return row < pairs.len_q ? visible_in_row(pairs.mask, row) : ColumnRange{0, -1}; }

// dp becomes the gradient with respect to what is read: dL = P o (dP - delta), with P = 2^(L - lse) and L what the scores become, times how fast
// that changes with what is read. Rows are queries. Unless SCORES is EXPRESSION, s is L already, -inf of pairs that are masked.
template <int M, int N>
OP void gradients_of_reads(Acc<M, N>& dp, const Acc<M, N>& s, const RowVec<M>& lse, const RowVec<M>& delta, const ScoreContext& x, int first_row,
                           int col0, float scale_log2) {
  const int row0 = not_ahead(first_row);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) {
      PairPlace at = place_of<false>(s, l, r, row0, col0);
      const float score = s.at(l, r);
      float became = score;
      bool takes = true;
      if (SCORES == EXPRESSION) {
        read_arrays(at, x);
        became = score_of(score, at, x) * LOG2E;
        takes = !MASKED_PAIRS || takes_part(at, x);
      }
      const float p = takes ? exp2_approx(fmaf(became, scale_log2, -lse.at(l, s.slot(r)))) : 0.f;
      float gradient = p * (dp.at(l, r) - delta.at(l, s.slot(r)));
      if (MASKED_PAIRS && p == 0.f) gradient = 0.f;           // of a pair that is masked alone, dP may be anything
      if (HAS_FACTOR) gradient = p == 0.f || gradient == 0.f ? 0.f : gradient * factor_of(score, at, x);
      dp.at(l, r) = gradient;
    }
  }
}

// Each pair's share goes to the element that it reads, which its score decides.
template <int M, int N>
OP void scatter_by_score(float* sums, const Acc<M, N>& gradient, const Acc<M, N>& s, const ScoreContext& x, int row0, int col0) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r)
      if (gradient.at(l, r) != 0.f)                           // as it is of all pairs that do not exist
        add_atomically(sums + element_of(s.at(l, r), place_of<false>(s, l, r, row0, col0), x), gradient.at(l, r));
  }
}

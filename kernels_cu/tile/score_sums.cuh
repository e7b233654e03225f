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

constexpr bool HAS_ROWS = OF_QUERY || OF_DISTANCE, HAS_COLS = OF_KEY || OF_DISTANCE;          // whether a unit tells them apart
constexpr int UNIT_SUMS = (HAS_ROWS ? TILE_Q : 1) * (HAS_COLS ? TILE_KV : 1);
constexpr int PARTS_OF_BLOCK = HAS_ROWS ? 1 : WARPS;          // rows are dealt out to warps, each of which has a sum of its own where they share one

constexpr int DIAGONAL_STEP = TILE_Q / TILE_KV;                // key tiles to the next query tile on a diagonal
static_assert(TILE_Q % TILE_KV == 0);

template <> OP double from_float<double>(float x) { return x; }

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
  OP void advance(const ScoreGradientParams& p, const Mask& mask) {
    do step(p);
    while (left > 0 && !visible(mask));
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
  const int kv_tile = OF_KEY ? take(rest, ceil_div(p.len_kv, TILE_KV)) : 0, q_tile = OF_QUERY ? take(rest, ceil_div(p.len_q, TILE_Q)) : 0;
  const int diagonal = OF_DISTANCE ? take(rest, diagonals(p)) - DIAGONAL_STEP * (ceil_div(p.len_q, TILE_Q) - 1) : 0;
  PairCursor unit = owner_of(p, rest);
  unit.kv_tile = kv_tile + diagonal, unit.q_tile = q_tile;
  return unit;
}

// The first pair of tiles of a block's part of a unit.
OP PairCursor first_pair(const ScoreGradientParams& p, const Mask& mask, u32 unit_number, u32 split) {
  PairCursor at = unit_of(p, unit_number);
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
  if (at.left > 0 && !at.visible(mask)) {
    if (OF_QUERY && OF_KEY) at.left = 0;                      // nor is any pair of these tiles in another head
    else at.advance(p, mask);
  }
  return at;
}

// lse and delta of the rows of a tile, from where the backward's own tiles have them, to TILE_Q words each. Asynchronous like the tiles.
OP void load_stats_async(SharedAddress to, const ScoreGradientParams& p, const PairCursor& at) {
  const int tiles = int(divide(p.len_q - 1, p.stats_rows_divmod)) + 1, rows = int(p.stats_rows_divmod.divisor);
  const i64 first_tile = i64(at.batch_number(p) * p.heads + at.head) * tiles;
  for_lane(l) {
    const int i = Block::thread(l) * 4, row = at.q_tile * TILE_Q + i % TILE_Q, tile = int(divide(row, p.stats_rows_divmod));
    if (i < 2 * TILE_Q) {
      const float* const from = p.stats + ((first_tile + tile) * 2 + i / TILE_Q) * rows + (row - tile * rows);
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

// Calls use(row, col, sum) for each sum of a unit that the warp has a part of, whose rows of the tile begin at row0; a row or a column that the
// elements do not belong to is 0.
template <int M, int N, typename Use> OP void for_sums(const Acc<M, N>& acc, int row0, Use use) {
  const auto plus = [](float a, float b) { return a + b; };
  if constexpr (HAS_ROWS && HAS_COLS) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < acc.regs; ++r) use(row0 + acc.row(l, r), acc.col(l, r), acc.at(l, r));
    }
  } else if constexpr (HAS_COLS) {
    ColVec<N> sums;
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < sums.slots; ++i) sums.at(l, i) = 0.f;
      #pragma unroll
      for (int r = 0; r < acc.regs; ++r) sums.at(l, acc.col_slot(r)) += acc.at(l, r);
    }
    reduce_lanes<32, 4>(sums, plus);
    for_lane(l) {
      #pragma unroll
      for (int i = 0; i < sums.slots; ++i)
        if (l < 4) use(0, sums.col(l, i), sums.at(l, i));
    }
  } else {
    RowVec<M> sums;
    fill(sums, 0.f);
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < acc.regs; ++r) sums.at(l, acc.slot(r)) += acc.at(l, r);
    }
    quad_reduce(sums, plus);
    if constexpr (HAS_ROWS) {
      for_lane(l) {
        #pragma unroll
        for (int i = 0; i < sums.slots; ++i)
          if (l % 4 == 0) use(row0 + sums.row(l, i), 0, sums.at(l, i));
      }
    } else {
      Regs<float, 1> sum;
      for_lane(l) {
        sum.at(l, 0) = 0.f;
        #pragma unroll
        for (int i = 0; i < sums.slots; ++i) sum.at(l, 0) += sums.at(l, i);
      }
      reduce_lanes<32, 4>(sum, plus);
      for_lane(l) if (l == 0) use(0, 0, sum.at(l, 0));
    }
  }
}

OP bool exists(const ScoreGradientParams& p, int q_idx, int kv_idx) { return q_idx < p.len_q && kv_idx < p.len_kv; }

// how far into the gradient the elements of a query begin, or of a head
OP i64 offset_of_query(const ScoreGradientParams& p, const PairCursor& unit, int q_idx) {
  return offset_of(p.gradient, unit.batch, unit.head, q_idx) + unit.head / p.heads_per_kv * p.head_kv_stride;
}

OP void put_element(const ScoreGradientParams& p, i64 element, float sum) {
  if (p.through_sums) write(p.sums + element, read(p.sums + element) + sum);
  else write(static_cast<GradientElement*>(p.gradient.data) + element, sum);
}

// A sum of a unit goes to its element, which no other sum goes to.
OP void put_sum(const ScoreGradientParams& p, const PairCursor& unit, int row, int col, float sum) {
  const int q_idx = unit.q_tile * TILE_Q + row, kv_idx = unit.kv_tile * TILE_KV + col;
  if (!exists(p, q_idx, kv_idx)) return;
  const i64 offset = p.first_element + offset_of_query(p, unit, q_idx) + kv_idx * p.gradient.col_stride;
  if (GATHERED) write(p.places + offset, sum);
  else put_element(p, offset, sum);
}

// The end of a block: its sums go to their elements where it is the only block of its unit, and else to partial sums, which are added up later.
// Those of computed indices go to whichever elements they name.
template <int M, int N> OP void end_unit(const ScoreGradientParams& p, const Acc<M, N>& acc, u32 unit_number, u32 split, int row0) {
  const PairCursor unit = unit_of(p, unit_number);
  if constexpr (SCATTERED) {
    struct { const int (&batch)[BATCH_AXES]; u32 batch_number; } here{unit.batch, unit.batch_number(p)};
    const ScoreContext x = score_context(p, here, unit.head);
    for_sums(acc, row0, [&](int row, int col, float sum) {
      const int q_idx = unit.q_tile * TILE_Q + row, kv_idx = unit.kv_tile * TILE_KV + col;
      if (exists(p, q_idx, kv_idx) && sum != 0.f) add_atomically(p.sums + element_of(0.f, place_at(q_idx, kv_idx), x), sum);
    });
  } else if (OF_QUERY && OF_KEY && p.splits == 1) {
    for_sums(acc, row0, [&](int row, int col, float sum) { put_sum(p, unit, row, col, sum); });
  } else {
    const u32 part = split * PARTS_OF_BLOCK + (PARTS_OF_BLOCK > 1 ? warp_id() : 0);
    float* const partials = p.partials + (i64(unit_number) * p.splits * PARTS_OF_BLOCK + part) * UNIT_SUMS;
    for_sums(acc, row0, [&](int row, int col, float sum) { write(partials + row * (HAS_COLS ? TILE_KV : 1) + col, sum); });
  }
}

// The sum of what each warp of a block has, in their order: each lane's own, or with ONE that of all lanes. It is for the first warp alone.
constexpr int ADD_BYTES = 32 * WARPS * int(sizeof(float));
template <bool ONE> OP void add_warps(Regs<float, 1>& sum) {
  const int own = warp_id();                                  // asked by all lanes: it is a shuffle
  const SharedAddress smem = shared_memory();
  if (ONE) reduce_lanes<32>(sum, [](float a, float b) { return a + b; });
  for_lane(l) store_shared(smem + (own * 32 + l) * int(sizeof(float)), sum.at(l, 0));
  sync_block();                                               // without it sums are read that have not been written
  for_lane(l) {
    sum.at(l, 0) = 0.f;
    for (int warp = 0; warp < WARPS; ++warp) sum.at(l, 0) += load_shared<float>(smem + (warp * 32 + l) * int(sizeof(float)));
  }
}

// 32 sums of a unit from their parts, by a block whose warps add up parts in turn.
constexpr int GROUPS_OF_UNIT = ceil_div(UNIT_SUMS, 32);
OP void add_partials(const ScoreGradientParams& p) {
  const int own = warp_id();
  const u32 unit_number = block_id() / GROUPS_OF_UNIT, parts = p.splits * PARTS_OF_BLOCK;
  const int first = int(block_id() % GROUPS_OF_UNIT) * 32;
  const float* const partials = p.partials + i64(unit_number) * parts * UNIT_SUMS;
  constexpr bool ONE = UNIT_SUMS == 1;                        // whose parts are dealt out to lanes
  Regs<float, 1> sum;
  for_lane(l) {
    sum.at(l, 0) = 0.f;
    const u32 end = ONE || first + l < UNIT_SUMS ? parts : 0;
    #pragma unroll 8
    for (u32 part = ONE ? own * 32 + l : own; part < end; part += ONE ? 32 * WARPS : WARPS)
      sum.at(l, 0) += read(partials + i64(part) * UNIT_SUMS + (ONE ? 0 : first + l));
  }
  add_warps<ONE>(sum);
  if (own > 0) return;
  const PairCursor unit = unit_of(p, unit_number);
  for_lane(l) {
    const int i = first + l, cols = HAS_COLS ? TILE_KV : 1;
    if (i < UNIT_SUMS) put_sum(p, unit, i / cols, i % cols, sum.at(l, 0));
  }
}

// The same of 32 distances of an owner, each of which is on one diagonal of tiles or on two, once in each row.
OP void add_diagonals(const ScoreGradientParams& p) {
  const int own = warp_id(), distances = p.len_q + p.len_kv - 1, groups = ceil_div(distances, 32);
  const u32 owner_number = block_id() / groups;
  const int first = int(block_id() % groups) * 32;
  Regs<float, 1> sum;
  for_lane(l) {
    sum.at(l, 0) = 0.f;
    // from the first key of the first diagonal, whose queries are those of the last tile
    const int from = first + l - (p.len_q - 1) + (ceil_div(p.len_q, TILE_Q) - 1) * TILE_Q;
    for (int row = own; row < (first + l < distances ? TILE_Q : 0); row += WARPS) {
      const int key = from + row;
      if (key < 0 || key >= diagonals(p) * TILE_KV) continue;
      const i64 unit = i64(owner_number) * diagonals(p) + key / TILE_KV;
      #pragma unroll 4
      for (u32 split = 0; split < p.splits; ++split)
        sum.at(l, 0) += read(p.partials + (unit * p.splits + split) * UNIT_SUMS + row * TILE_KV + key % TILE_KV);
    }
  }
  add_warps<false>(sum);
  if (own > 0) return;
  const i64 place = offset_of_query(p, owner_of(p, owner_number), 0) + first;
  for_lane(l) if (first + l < distances) write(p.places + place + l, sum.at(l, 0));
}

// An element from all queries, keys or distances that read it, in one order, by a block.
OP void gather(const ScoreGradientParams& p) {
  const int own = warp_id(), count = OF_DISTANCE ? p.len_q + p.len_kv - 1 : OF_QUERY ? p.len_q : OF_KEY ? p.len_kv : 1;
  const i64 element = block_id();
  Regs<float, 1> sum;
  for_lane(l) sum.at(l, 0) = 0.f;
  for (u32 number = 0; number < owners(p); ++number) {
    const PairCursor owner = owner_of(p, number);
    struct { const int (&batch)[BATCH_AXES]; u32 batch_number; } here{owner.batch, owner.batch_number(p)};
    const ScoreContext x = score_context(p, here, owner.head);
    const float* const places = p.places + offset_of_query(p, owner, 0);
    for_lane(l) {
      for (int i = own * 32 + l; i < count; i += 32 * WARPS) {
        const int distance = i - (p.len_q - 1);               // any pair that is so far apart will do
        const int q_idx = OF_DISTANCE ? max_of(-distance, 0) : OF_QUERY ? i : 0, kv_idx = OF_DISTANCE ? max_of(distance, 0) : OF_KEY ? i : 0;
        if (element_of(0.f, place_at(q_idx, kv_idx), x) == element) sum.at(l, 0) += read(places + i);
      }
    }
  }
  add_warps<true>(sum);
  if (own > 0) return;
  for_lane(l) if (l == 0) put_element(p, element, sum.at(l, 0));
}

// Calls use(i) for each element of the array, dealt out to the threads of all blocks.
template <typename Use> OP void for_elements(const ScoreGradientParams& p, Use use) {
  for_lane(l) {
    const i64 i = i64(block_id()) * Block::threads + Block::thread(l);
    if (i < p.elements) use(i);
  }
}

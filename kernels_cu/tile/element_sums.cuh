// element_sums.cuh -- how the sums of units (score_sums.cuh) reach the elements of a gradient: at once, by partial sums, or by whichever index an
// expression computes.
#pragma once
#include "tile/score_sums.cuh"

// What a lane has of the sums of a unit, of a fragment: of all pairs, or of its columns or rows.
template <int M, int N> using LaneSums = Choose<HAS_ROWS && HAS_COLS, Acc<M, N>, Choose<HAS_COLS, ColVec<N>, RowVec<M>>>;
template <int M, int N> OP void add_to(ColVec<N>& sums, const Acc<M, N>& acc) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) sums.at(l, acc.col_slot(r)) += acc.at(l, r);
  }
}
template <int M, int N> OP void add_to(RowVec<M>& sums, const Acc<M, N>& acc) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < acc.regs; ++r) sums.at(l, acc.slot(r)) += acc.at(l, r);
  }
}
template <int M, int N> OP void add_to(Acc<M, N>& sums, const Acc<M, N>& acc) { add(sums, acc); }
template <int N> OP void fill(ColVec<N>& sums, float value) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < sums.slots; ++i) sums.at(l, i) = value;
  }
}

// Calls use(row, col, sum) for each sum of a unit that the warp has a part of, whose rows of the tile begin at row0; a row or a column that the
// elements do not belong to is 0.
template <int N, typename Use> OP void for_sums(ColVec<N> sums, int, Use use) {
  reduce_lanes<32, 4>(sums, [](float a, float b) { return a + b; });
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < sums.slots; ++i)
      if (l < 4) use(0, sums.col(l, i), sums.at(l, i));
  }
}
template <int M, typename Use> OP void for_sums(RowVec<M> sums, int row0, Use use) {
  const auto plus = [](float a, float b) { return a + b; };
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
template <int M, int N, typename Use> OP void for_sums(const Acc<M, N>& acc, int row0, Use use) {
  if constexpr (HAS_ROWS && HAS_COLS) {
    for_lane(l) {
      #pragma unroll
      for (int r = 0; r < acc.regs; ++r) use(row0 + acc.row(l, r), acc.col(l, r), acc.at(l, r));
    }
  } else {
    LaneSums<M, N> sums;
    fill(sums, 0.f);
    add_to(sums, acc);
    for_sums(sums, row0, use);
  }
}

OP bool exists(const ScoreGradientParams& p, int q_idx, int kv_idx) { return q_idx < elements_of<QUERIES>(p) && kv_idx < elements_of<KEYS>(p); }

// What an index may depend on besides a pair: of an owner or a unit that has the elements of one sequence alone, how long that is.
struct LengthsOfOwner {
  int q, kv;
};
OP LengthsOfOwner lengths_of(const ScoreGradientParams& p, u32 batch_number) {
  if constexpr (VARLEN) {
    if (p.batch_summed[BATCH_AXES - 1] == 1) return {rows_of_sequence<QUERIES>(p, batch_number).len(), rows_of_sequence<KEYS>(p, batch_number).len()};
  }
  return {p.len_q, p.len_kv};
}

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

template <typename T> OP void write_two(T* to, float first, float second) {
  count_written(2 * sizeof(T));
  *reinterpret_cast<Two<T>*>(to) = {{from_float<T>(first), from_float<T>(second)}};
}

// The same of the pairs of a query with a key and the next one, which are written at once where that is at an even place.
OP void put_two(const ScoreGradientParams& p, i64 offset_of_row, int q_idx, int kv_idx, float first, float second) {
  const bool dense = !GATHERED && !p.through_sums && p.gradient.col_stride == 1;
  const i64 element = offset_of_row + kv_idx * p.gradient.col_stride;
  if (dense && exists(p, q_idx, kv_idx + 1) && element % 2 == 0) {
    write_two(static_cast<GradientElement*>(p.gradient.data) + element, first, second);
    return;
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!exists(p, q_idx, kv_idx + i)) continue;
    if (GATHERED) write(p.places + element + i * p.gradient.col_stride, i == 0 ? first : second);
    else put_element(p, element + i * p.gradient.col_stride, i == 0 ? first : second);
  }
}
// The same for all pairs of a unit: where the elements of a row begin is found once.
template <int M, int N> OP void put_sums(const ScoreGradientParams& p, const PairCursor& unit, const Acc<M, N>& acc, int row0) {
  const int first_row = unit.q_tile * TILE_Q + row0, first_col = unit.kv_tile * TILE_KV;
  for_lane(l) {
    i64 offset[M / 8];
    #pragma unroll
    for (int slot = 0; slot < M / 8; ++slot) offset[slot] = p.first_element + offset_of_query(p, unit, first_row + RowVec<M>::row(l, slot));
    #pragma unroll
    for (int r = 0; r < acc.regs; r += 2)
      put_two(p, offset[acc.slot(r)], first_row + acc.row(l, r), first_col + acc.col(l, r), acc.at(l, r), acc.at(l, r + 1));
  }
}

// The end of a block: its sums go to their elements where it is the only block of its unit, and else to partial sums, which are added up later.
// Those of computed indices go to whichever elements they name.
template <typename Sums> OP void end_unit(const ScoreGradientParams& p, const Sums& acc, u32 unit_number, u32 split, int row0) {
  const PairCursor unit = unit_of(p, unit_number);
  if constexpr (SCATTERED) {
    struct { const int (&batch)[BATCH_AXES]; u32 batch_number; } here{unit.batch, unit.batch_number(p)};
    const LengthsOfOwner lens = lengths_of(p, here.batch_number);
    const ScoreContext x = score_context(p, here, unit.head, lens.q, lens.kv);
    for_sums(acc, row0, [&](int row, int col, float sum) {
      const int q_idx = unit.q_tile * TILE_Q + row, kv_idx = unit.kv_tile * TILE_KV + col;
      if (exists(p, q_idx, kv_idx) && sum != 0.f) add_atomically(p.sums + element_of(0.f, place_at(q_idx, kv_idx), x), sum);
    });
  } else {
    if constexpr (OF_QUERY && OF_KEY) {
      if (p.splits == 1) return put_sums(p, unit, acc, row0);
    }
    const u32 part = split * PARTS_OF_BLOCK + (PARTS_OF_BLOCK > 1 ? warp_id() - PRODUCERS : 0);
    float* const partials = p.partials + (i64(unit_number) * p.splits * PARTS_OF_BLOCK + part) * UNIT_SUMS;
    for_sums(acc, row0, [&](int row, int col, float sum) { write(partials + row * (HAS_COLS ? TILE_KV : 1) + col, sum); });
  }
}

// The sum of what each warp of a block has, in their order: each lane's own, or with ONE that of all lanes. It is for the first warp alone.
constexpr int SUMS_OF_LANE = 4;                               // of pairs
constexpr int ADD_BYTES = 32 * WARPS * (OF_QUERY && OF_KEY ? SUMS_OF_LANE : 1) * int(sizeof(float));
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
OP void add_partials(const ScoreGradientParams& p) {
  constexpr int GROUPS_OF_UNIT = ceil_div(UNIT_SUMS, 32);
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

// The same of pairs, which are many: four for each lane, of a query and keys side by side. Where parts are few, a warp adds up all of them, and
// no block waits for its warps; what those of a block have is added up by the first ones, a sum for each lane.
constexpr u32 FEW_PARTS = 32;                                 // the planner has as many blocks
OP void add_partials_of_pairs(const ScoreGradientParams& p) {
  constexpr int SUMS_OF_WARP = 32 * SUMS_OF_LANE, GROUPS_OF_UNIT = ceil_div(UNIT_SUMS, SUMS_OF_WARP);
  static_assert(!(OF_QUERY && OF_KEY) || (UNIT_SUMS % SUMS_OF_WARP == 0 && TILE_KV % SUMS_OF_LANE == 0), "each lane has sums of one query");
  const bool few = p.splits <= FEW_PARTS;
  const int own = warp_id();
  const u32 group = few ? block_id() * WARPS + own : block_id(), unit_number = group / GROUPS_OF_UNIT;
  if (unit_number * p.splits >= p.parts) return;              // few: of the last block, a warp that is left over
  const PairCursor unit = unit_of(p, unit_number);
  const int first = int(group % GROUPS_OF_UNIT) * SUMS_OF_WARP, row0 = unit.q_tile * TILE_Q, col0 = unit.kv_tile * TILE_KV;
  const float* const partials = p.partials + i64(unit_number) * p.splits * UNIT_SUMS;
  const SharedAddress smem = shared_memory();
  for_lane(l) {
    const int i = first + l * SUMS_OF_LANE, q_idx = row0 + i / TILE_KV, kv_idx = col0 + i % TILE_KV;
    Vector<16> sums{};
    #pragma unroll 8
    for (u32 part = few ? 0 : own; part < p.splits; part += few ? 1 : WARPS) {
      const auto more = read_vector<16>(partials + i64(part) * UNIT_SUMS + i);
      #pragma unroll
      for (int j = 0; j < SUMS_OF_LANE; ++j) sums.words[j] = float_bits(bits_float(sums.words[j]) + bits_float(more.words[j]));
    }
    if (few) {
      const i64 offset = p.first_element + offset_of_query(p, unit, q_idx);
      #pragma unroll
      for (int j = 0; j < SUMS_OF_LANE; j += 2) put_two(p, offset, q_idx, kv_idx + j, bits_float(sums.words[j]), bits_float(sums.words[j + 1]));
    } else {
      store_shared(smem + (own * 32 + l) * 16, sums);
    }
  }
  if (few) return;
  sync_block();                                               // without it sums are read that have not been written
  #pragma unroll
  for (int of = own; of < SUMS_OF_LANE; of += WARPS) {        // blocks have two warps, or more than there is a part for
    for_lane(l) {
      const int i = of * 32 + l;
      float sum = 0.f;
      for (int warp = 0; warp < WARPS; ++warp) sum += load_shared<float>(smem + (warp * SUMS_OF_WARP + i) * int(sizeof(float)));
      put_sum(p, unit, (first + i) / TILE_KV, (first + i) % TILE_KV, sum);
    }
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
    const LengthsOfOwner lens = lengths_of(p, here.batch_number);
    const ScoreContext x = score_context(p, here, owner.head, lens.q, lens.kv);
    const float* const places = p.places + offset_of_query(p, owner, 0);
    for_lane(l) {
      for (int i = own * 32 + l; i < count; i += 32 * WARPS) {
        const int distance = i - (p.len_q - 1);               // any pair that is so far apart will do
        const int q_idx = OF_DISTANCE ? max_of(-distance, 0) : OF_QUERY ? i : 0, kv_idx = OF_DISTANCE ? max_of(distance, 0) : OF_KEY ? i : 0;
        if (VARLEN && (q_idx >= lens.q || kv_idx >= lens.kv)) continue;
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

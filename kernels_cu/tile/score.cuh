// score.cuh -- what becomes of scores besides scale and softcap, pair by pair, see tile/score_context.cuh, and pairs that an expression or an array
// masks (MASKED_PAIRS).
#pragma once
#include "tile/bend.cuh"
#include "tile/gradient.cuh"
#include "tile/pair_bits.cuh"
#include "tile/score_context.cuh"

// How far the middle of a lane's columns is from its first.
template <int M, int N> OP constexpr int middle_column(const Acc<M, N>&) { return N / 2 - 4; }

// The place of a pair of a fragment that starts at row0 and col0: rows are queries, and columns keys, or TRANSPOSED the other way round. It may
// lie beyond the ends.
template <bool TRANSPOSED, int M, int N> OP PairPlace place_of(const Acc<M, N>& s, int l, int r, int row0, int col0) {
  const int row = row0 + s.row(l, r), first_col = col0 + s.col(l, 0), further = s.col(l, r) - s.col(l, 0), col = first_col + further;
  return {TRANSPOSED, TRANSPOSED ? col : row, TRANSPOSED ? row : col, float(row), float(first_col), float(further), 0.f, true};
}
// PLUS_LINEAR: what the pairs of a row have in common of the term, in units of log 2. It is that of the key in the middle of the lane's; TRANSPOSED that
// of the query in the middle of the tile. BENDS: beyond the diagonal with what comes there; where columns are keys `modify_scores` adds all of it.
template <bool TRANSPOSED, int M, int N>
OP void terms_of_rows(RowVec<M>& terms, const Acc<M, N>& s, const ScoreContext& x, int row0, int col0, Bend bend = BEFORE) {
  if constexpr (BENDS && !TRANSPOSED) return fill(terms, 0.f);
  for_lane(l) {
    const int lane = TMA_REDUCE_DQ || (TRANSPOSED && VARLEN) ? not_ahead(l) : l;
    const int row = row0 + RowVec<M>::row(lane, 0), col = col0 + (TRANSPOSED ? N / 2 : s.col(l, 0) + middle_column(s));
    terms.at(l, 0) = term_of({TRANSPOSED, TRANSPOSED ? col : row, TRANSPOSED ? row : col, float(row), float(col), 0.f, 0.f, true}, x) * LOG2E;
    const float beyond = bend == BEYOND ? bend_of(x) : 0.f, before = TRANSPOSED ? per_key_of(x) : per_query_of(x), step = BENDS ? before + beyond : before;
    if (BENDS) terms.at(l, 0) = fmaf(beyond * LOG2E, float(beyond_diagonal(x, col, row)), terms.at(l, 0));
    #pragma unroll
    for (int i = 1; i < M / 8; ++i)
      terms.at(l, i) = fmaf(step, (RowVec<M>::row(l, i) - RowVec<M>::row(l, 0)) * LOG2E, terms.at(l, 0));
  }
}

// The element for a pair; beyond the ends that of the last one.
template <typename Kind, typename T> OP Kind of_pair(const PairTensor& t, const PairPlace& at, const ScoreContext& x) {
  return AsKind<Kind>::of(read_at<T>(t.data, at.element_q(x.q_len) * t.row_stride + at.element_kv(x.kv_len) * t.col_stride));
}

OP void read_arrays(PairPlace& at, const ScoreContext& x, bool ask_pairs = true) {
  if (HAS_BIAS) at.bias = of_pair<float, BiasElement>(x.bias, at, x);
  if (HAS_PAIR_MASK && ask_pairs) at.seen = of_pair<bool, unsigned char>(x.pair_mask, at, x);
}

// The elements of a lane for the pairs of a fragment, all on their way before the first is needed. Those of two neighbouring
// keys lie side by side, and are read at once. Where keys are rows, a lane so reads what is another's: of each query, the lanes of a quad read
// eight keys, and `movmatrix` deals them out. Elements that have not 16 bits it cannot, and there all that a query has are read from one place.
template <typename T> struct alignas(2 * sizeof(T)) Two {
  T x[2];
};
template <typename T> struct PairOf { typedef Two<T> type; };
template <> struct PairOf<half_t> { typedef u32 type; };
template <> struct PairOf<bfloat_t> { typedef u32 type; };
template <typename T> OP float of_two(const Two<T>& pair, int i) { return to_float(pair.x[i]); }
template <typename T> OP float of_two(u32 pair, int i) { return unpack<T>(pair, i); }

// Of a tile that is WHOLE every pair exists, and none is asked for; else pairs beyond the ends, which are masked, read what the last ones do.
template <bool TRANSPOSED, bool WHOLE, int M, int N, typename T, typename Pair, int REGS>
OP void load_lane(Regs<Pair, REGS>& into, int l, const PairTensor& t, const ScoreContext& x, int row0, int col0) {
  using Fragment = Acc<M, N>;
  constexpr bool QUADS = TRANSPOSED && sizeof(T) == 2;
  const i64 step = t.row_stride * i64(sizeof(T));             // to the next query
  const auto query = [&](int i) { return WHOLE ? i : min_of(i, x.q_len - 1); };
  // Two keys begin at an even one. An array has an even number of them, but a sequence may end between two.
  const auto key = [&](int i) { return WHOLE ? i : min_of(i, TRANSPOSED && !QUADS ? x.kv_len - 1 : VARLEN ? (x.kv_len - 1) & ~1 : x.kv_len - 2); };
  const int first_query = TRANSPOSED ? col0 + (QUADS ? l / 4 : Fragment::col(l, 0)) : row0 + Fragment::row(l, 0);
  const int first_key = TRANSPOSED ? row0 + (QUADS ? l % 4 * 2 : Fragment::row(l, 0)) : col0 + Fragment::col(l, 0);
  const char* from = t.data + first_query * step + first_key * i64(sizeof(T));
  #pragma unroll
  for (int r = 0; r < 2 * REGS; r += 2) {
    const int rows = 8 * Fragment::slot(r), cols = Fragment::reg_col(r);              // further than the first
    if constexpr (TRANSPOSED && WHOLE) {
      if (r > 0 && cols > Fragment::reg_col(r - 2)) from += 8 * step;
      if constexpr (QUADS) into.at(l, r / 2) = read_at<Pair>(from, rows / 2);
      else into.at(l, r / 2) = {read_at<T>(from, rows), read_at<T>(from + step, rows)};
    } else if constexpr (TRANSPOSED) {
      const auto of = [&](int i) { return t.data + query(first_query + cols + i) * step + key(first_key + rows) * i64(sizeof(T)); };
      if constexpr (QUADS) into.at(l, r / 2) = read_at<Pair>(of(0), 0);
      else into.at(l, r / 2) = {read_at<T>(of(0), 0), read_at<T>(of(1), 0)};
    } else {
      const char* const of_query = t.data + min_of(first_query + rows, x.q_len - 1) * step;
      if (WHOLE) into.at(l, r / 2) = read_at<Pair>(of_query + first_key * i64(sizeof(T)), cols / 2);
      else into.at(l, r / 2) = read_at<Pair>(of_query + key(first_key + cols) * i64(sizeof(T)), 0);
    }
  }
}
template <bool TRANSPOSED, int M, int N, typename T, typename Pair, int REGS>
OP void load_pairs(Regs<Pair, REGS>& into, const PairTensor& t, const ScoreContext& x, int row0, int col0) {
  const bool whole = TRANSPOSED ? row0 + M <= x.kv_len && col0 + N <= x.q_len : col0 + N <= x.kv_len;
  if (whole) {
    for_lane(l) load_lane<TRANSPOSED, true, M, N, T>(into, l, t, x, row0, col0);
  } else {
    for_lane(l) load_lane<TRANSPOSED, false, M, N, T>(into, l, t, x, row0, col0);
    stay_apart();
  }
}

// Which pairs of a lane take part, a bit for each register. With TILE_LIST most tiles are seen wholly and are not asked, so the few that are take a
// loop, not a text as long as the fragment, whose registers would be the kernel's. So do masks that take many registers by themselves.
constexpr bool PAIRS_IN_LOOP = TILE_LIST || MASK_IN_LOOP;
// In backwards, of masks that read arrays, before their scores exist: what is read comes beneath the product then. Forwards have other work there.
// Bits that were found before are one read, which is ahead in forwards, and as measured in backwards at dims up to 64.
constexpr bool ASKED_AHEAD = TILE_LIST && (PAIR_BITS ? WIDTH <= 64 : MASK_READS);
// All at once, so that their reads are on their way together, where there are registers. Four groups of consumers leave few for each, and without
// lists those of this text are the kernel's.
constexpr bool FEW_AT_ONCE = MASK_IN_LOOP || EXPLICIT_SCORES || !TILE_LIST || TILE_Q > 192;
template <bool TRANSPOSED, bool WITHIN, int M, int N> OP u64 ask_pairs_of_lane(int l, const ScoreContext& x, int row0, int col0) {
  using Fragment = Acc<M, N>;
  static_assert(Fragment::regs <= 64, "a bit for each register");
  constexpr int MOST = !FEW_AT_ONCE ? 32 : TRANSPOSED || (MASK_IN_LOOP && VARLEN) ? 4 : 8;
  constexpr int AT_ONCE = MOST > 16 && N % 64 == 0 ? 32 : MOST > 8 && N % 32 == 0 ? 16 : MOST > 4 && N % 16 == 0 ? 8 : 4, COLS = 2 * AT_ONCE;
  static_assert(N % COLS == 0, "whole columns of 16 rows at a time");
  u64 bits = 0;
  #pragma unroll
  for (int first = 0; first < Fragment::regs; first += Fragment::per_16_rows) {
    #pragma unroll 1
    for (int col = 0; col < N; col += COLS) {                 // so that what rows have is found once
      u32 found = 0;
      #pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        PairPlace at = place_of<TRANSPOSED>(Fragment(), l, first + r, row0, col0 + col);
        at.within = WITHIN;
        if (HAS_PAIR_MASK) at.seen = of_pair<bool, unsigned char>(x.pair_mask, at, x);
        found |= u32(takes_part(at, x)) << r;
      }
      bits |= u64(u32(not_ahead(int(found)))) << (first + col / 2);
    }
  }
  return bits;
}
// A tile all of whose columns exist has a text of its own, in which what they read is at constant distances.
constexpr bool WITHIN_APART = MASK_READS && !FEW_AT_ONCE;
template <int M, int N> using PairsOfLane = Choose<PAIR_BITS, PairWord<N>, u64>;
template <bool TRANSPOSED, int M, int N> OP void ask_pairs_of_tile(Regs<PairsOfLane<M, N>, 1>& taking_part, const ScoreContext& x, int row0, int col0) {
  if constexpr (PAIR_BITS) {
    constexpr u32 ROWS_OF_LIST = TRANSPOSED ? TILE_KV : OWN_LISTS ? 64 : TILE_Q;
    const u32 lists = ((TRANSPOSED ? x.kv_len : x.q_len) + ROWS_OF_LIST - 1) / ROWS_OF_LIST, tiles = ((TRANSPOSED ? x.q_len : x.kv_len) + u32(N - 1)) / N;
    const char* const words = pair_words(x.of.tiles.lists, words_of_lists(x.of.tiles, lists, tiles));
    read_pairs<N>(taking_part, words, {list_number(x.of.tiles, x.b, x.h), lists * ROWS_OF_LIST, tiles}, row0, col0);
  } else if (WITHIN_APART && col0 + N <= (TRANSPOSED ? x.q_len : x.kv_len)) {
    for_lane(l) taking_part.at(l, 0) = ask_pairs_of_lane<TRANSPOSED, true, M, N>(l, x, row0, col0);
  } else {
    for_lane(l) taking_part.at(l, 0) = ask_pairs_of_lane<TRANSPOSED, false, M, N>(l, x, row0, col0);
    if constexpr (WITHIN_APART) stay_apart();
  }
}

// What arrays have for the pairs of a fragment, on its way to registers.
constexpr bool BIAS_AHEAD = HAS_BIAS && (BIAS_BY_TWO || STAGED_BIAS);
template <int M, int N> struct PairArrays {
  Regs<typename PairOf<BiasElement>::type, BIAS_AHEAD ? M * N / 64 : 1> bias;
  Regs<Two<unsigned char>, HAS_PAIR_MASK && MASK_BY_TWO ? M * N / 64 : 1> seen;
  Regs<PairsOfLane<M, N>, 1> taking_part;                     // PAIR_BITS, ASKED_AHEAD: which pairs do, a bit for each register
};
template <bool TRANSPOSED, int M, int N> OP void load(PairArrays<M, N>& arrays, const ScoreContext& x, int first_row, int col0, bool ask_pairs = true) {
  const int row0 = not_ahead(first_row);                      // where rows of arrays begin would take registers beneath all products
  if constexpr (HAS_BIAS && BIAS_BY_TWO && !STAGED_BIAS) load_pairs<TRANSPOSED, M, N, BiasElement>(arrays.bias, x.bias, x, row0, col0);
  if constexpr (HAS_PAIR_MASK && MASK_BY_TWO && !TILE_LIST) load_pairs<TRANSPOSED, M, N, unsigned char>(arrays.seen, x.pair_mask, x, row0, col0);
  if constexpr (HAS_BIAS && BIAS_BY_TWO && TRANSPOSED && sizeof(BiasElement) == 2 && !STAGED_BIAS) movmatrix(arrays.bias);
  if constexpr (PAIR_BITS || (TRANSPOSED && ASKED_AHEAD)) {
    if (ask_pairs) ask_pairs_of_tile<TRANSPOSED, M, N>(arrays.taking_part, x, row0, col0);
  }
}

// PAIR_BITS: those of pairs that take no part become `masked`.
template <int M, int N> OP void mask_pairs(Acc<M, N>& s, const Regs<PairsOfLane<M, N>, 1>& taking_part, float masked) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r)
      if (!(taking_part.at(l, 0) >> r & 1)) s.at(l, r) = masked;
  }
}

// Scores become what the expressions say, and those of pairs that take no part become -inf. Where all take part, none is asked (`ask_pairs`).
// OF_TILE: what is left of a linear term has been in the product, or is in the statistics.
constexpr bool OF_PAIRS = SCORES == PLUS_TERM || SCORES == PLUS_LINEAR || SCORES == EXPRESSION;
template <bool TRANSPOSED, bool OF_TILE = TRANSPOSED, int M, int N>
OP void modify_scores(Acc<M, N>& s, const PairArrays<M, N>& arrays, const ScoreContext& x, int first_row, int col0, bool ask_pairs = true) {
  const int row0 = not_ahead(first_row);
  Regs<PairsOfLane<M, N>, 1> taking_part = arrays.taking_part;
  if constexpr (PAIRS_IN_LOOP && !PAIR_BITS && !(TRANSPOSED && ASKED_AHEAD)) {
    if (ask_pairs) ask_pairs_of_tile<TRANSPOSED, M, N>(taking_part, x, row0, col0);
  }
  if constexpr (BENDS && !OF_TILE) bend_scores<TRANSPOSED>(s, x, row0, col0);
  for_lane(l) {
    #pragma unroll
    for (int r = 0; OF_PAIRS && r < s.regs; ++r) {
      PairPlace at = place_of<TRANSPOSED>(s, l, r, row0, col0);
      if (HAS_BIAS) at.bias = BIAS_AHEAD ? of_two<BiasElement>(arrays.bias.at(l, r / 2), r % 2) : of_pair<float, BiasElement>(x.bias, at, x);
      float& score = s.at(l, r);
      if (SCORES == PLUS_TERM) score += term_of(at, x);
      if (SCORES == PLUS_LINEAR && !OF_TILE && !BENDS) score = fmaf(float(s.reg_col(r) - middle_column(s)), x.step, score);
      if (SCORES == PLUS_LINEAR && !OF_TILE && BENDS) score = fmaf(term_of(at, x), x.unit, score);
      if (SCORES == EXPRESSION) score = score_of(score, at, x) * LOG2E;
    }
    if (MASKED_PAIRS && ask_pairs) {
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) {
        if constexpr (PAIRS_IN_LOOP) {
          if (!(taking_part.at(l, 0) >> r & 1)) s.at(l, r) = masked_score(x);
        } else {
          PairPlace at = place_of<TRANSPOSED>(s, l, r, row0, col0);
          if (HAS_PAIR_MASK && !MASK_BY_TWO) at.seen = of_pair<bool, unsigned char>(x.pair_mask, at, x);
          else if (HAS_PAIR_MASK) at.seen = arrays.seen.at(l, r / 2).x[r % 2] != 0;
          if (!takes_part(at, x)) s.at(l, r) = masked_score(x);
        }
      }
    }
  }
}
template <bool TRANSPOSED, int M, int N> OP void modify_scores(Acc<M, N>& s, const ScoreContext& x, int row0, int col0, bool ask_pairs = true) {
  PairArrays<M, N> arrays;
  load<TRANSPOSED>(arrays, x, row0, col0, ask_pairs);
  modify_scores<TRANSPOSED>(s, arrays, x, row0, col0, ask_pairs);
}

// PACK_GQA: what the rows of a fragment have, each a query of its own of some head.
template <int M> struct PackedRows {
  Regs<HeadTerms, M / 8> terms;
  Regs<int, M / 8> head, query;                               // of a row that does not exist, a head below 0
};
template <int M, typename Params, typename Coord>
OP void find_rows(PackedRows<M>& rows, const Params& p, const Coord& here, const Mask& mask, int len_kv, int row0) {
  static_assert(!PACK_GQA || !DROPOUT, "which asks a head for a number");
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const int row = row0 + RowVec<M>::row(l, i), head = query_head(mask, here.head, row, p.len_q);
      rows.head.at(l, i) = row < p.len_q ? head : -1;
      rows.query.at(l, i) = queries_of(mask, row, 1).first;
      if (row >= p.len_q) continue;
      HeadTerms& terms = rows.terms.at(l, i) = head_terms(p, here, head, int(mask.of.queries_divmod.divisor), len_kv);
      if (HAS_BIAS) terms.bias.data += rows.query.at(l, i) * terms.bias.row_stride * i64(sizeof(BiasElement)), terms.bias.row_stride = 0;
    }
  }
}
// Their elements of a bias, where these are read by two.
template <bool WHOLE, int M, int N> OP void load_packed_lane(PairArrays<M, N>& arrays, int l, const PackedRows<M>& rows, int len_kv, int col0) {
  using Fragment = Acc<M, N>;
  using Pair = typename PairOf<BiasElement>::type;
  const int last = VARLEN ? (len_kv - 1) & ~1 : len_kv - 2, first = col0 + Fragment::col(l, 0);   // as in load_lane
  #pragma unroll
  for (int i = 0; i < M / 8; ++i) {
    if (rows.head.at(l, i) < 0) continue;
    const char* const from = rows.terms.at(l, i).bias.data;
    #pragma unroll
    for (int r = 0; r < Fragment::regs; r += 2) {
      if (Fragment::slot(r) != i) continue;
      if (WHOLE) arrays.bias.at(l, r / 2) = read_at<Pair>(from + first * i64(sizeof(BiasElement)), Fragment::reg_col(r) / 2);
      else arrays.bias.at(l, r / 2) = read_at<Pair>(from + min_of(first + Fragment::reg_col(r), last) * i64(sizeof(BiasElement)), 0);
    }
  }
}
template <int M, int N> OP void load_packed(PairArrays<M, N>& arrays, const PackedRows<M>& rows, int len_kv, int col0) {
  if constexpr (HAS_BIAS && BIAS_BY_TWO) {
    if (col0 + N <= len_kv) {
      for_lane(l) load_packed_lane<true>(arrays, l, rows, len_kv, col0);
    } else {
      for_lane(l) load_packed_lane<false>(arrays, l, rows, len_kv, col0);
      stay_apart();
    }
  }
}
template <int M, int N, typename Params, typename Coord>
OP void modify_packed_scores(Acc<M, N>& s, const PairArrays<M, N>& arrays, const PackedRows<M>& rows, const Params& p, const Coord& here, const Mask& mask, int len_kv, int col0,
                             bool ask_pairs) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      if (rows.head.at(l, i) < 0) continue;
      const ScoreContext x = score_context(p, here, rows.head.at(l, i), rows.terms.at(l, i), int(mask.of.queries_divmod.divisor), len_kv);
      #pragma unroll
      for (int r = 0; r < s.regs; ++r) {
        if (s.slot(r) != i) continue;
        PairPlace at = place_of<false>(s, l, r, 0, col0);
        at.q_idx = rows.query.at(l, i), at.row = float(at.q_idx);
        if (HAS_BIAS) at.bias = BIAS_BY_TWO ? of_two<BiasElement>(arrays.bias.at(l, r / 2), r % 2) : of_pair<float, BiasElement>(x.bias, at, x);
        if (HAS_PAIR_MASK && ask_pairs) at.seen = of_pair<bool, unsigned char>(x.pair_mask, at, x);
        if (SCORES == PLUS_TERM) s.at(l, r) += term_of(at, x);
        if (SCORES == EXPRESSION) s.at(l, r) = score_of(s.at(l, r), at, x) * LOG2E;
        if (MASKED_PAIRS && ask_pairs && !takes_part(at, x)) s.at(l, r) = -infinity();
      }
    }
  }
}

// Before the loop: seed and offset from where they are. With PLACED the last array that an expression might read is none, but says where
// pairs are numbered from: queries and keys, multiples of 64, in the halves of its address, heads in its first extent.
OP Dropping seeded(const ScoreParams& s) {
  DropoutParams of = s.dropout;
  if (s.seed) {
    const u64 seed = read_at<u64>(u64(s.seed), 0);
    of.seed_low = u32(seed), of.seed_high = u32(seed >> 32), of.offset = u32(read_at<u64>(u64(s.seed), 1));
  }
  Dropping dropout = dropping(of);
  if constexpr (PLACED) {
    const CapturedArray& place = s.captured[CAPTURED - 1];
    dropout.query += u32(place.data) / 64 * 8, dropout.kv += u32(place.data >> 32) / 64 * 4, dropout.key += u32(place.extent[0]);
  }
  return dropout;
}

// The derivative of the softcap where it gave this score; of none, `inverse` is 0.
OP float bend_of(float score, float inverse) {
  const float bent = score * inverse;
  return SOFTCAP && EXPLICIT_SCORES ? 1.f - bent * bent : 1.f;
}

// Of an expression in the backward, where rows are keys and columns are queries: raw scores become p = 2^(score - lse), and the other warp is
// passed p times the derivatives of the expression and of the softcap. Selected, not multiplied: whatever is at a masked pair, p is 0 there.
template <int M, int N>
OP void probabilities(Acc<M, N>& s, const ColVec<N>& lse, const ScoreContext& x, const TransposedMask& mask, bool masked, int first_row,
                      int col0, float softcap, PassedTile<M, N> passed, bool ask_pairs = true) {
  const int row0 = not_ahead(first_row);
  const float inverse = SOFTCAP && softcap > 0.f ? 1.f / softcap : 0.f;
  for_lane(l) {
    ColumnRange queries[M / 8];
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) queries[i] = masked ? visible_in_row(mask, row0 + RowVec<M>::row(l, i)) : ColumnRange{0, x.q_len - 1};
    #pragma unroll
    for (int r = 0; r < s.regs; r += passed.per_move) {
      float factor[passed.per_move];
      #pragma unroll
      for (int i = 0; i < passed.per_move; ++i) {
        PairPlace at = place_of<true>(s, l, r + i, row0, col0);
        read_arrays(at, x, ask_pairs);
        const ColumnRange& seen = queries[s.slot(r + i)];
        const float score = s.at(l, r + i);
        const bool takes = seen.first <= at.q_idx && at.q_idx <= seen.last && (!MASKED_PAIRS || !ask_pairs || takes_part(at, x));
        const float p = takes ? exp2_approx(fmaf(score_of(score, at, x), LOG2E, -lse.at(l, s.col_slot(r + i)))) : 0.f;
        s.at(l, r + i) = p;
        factor[i] = p == 0.f ? 0.f : p * slope_of(score, at, x) * bend_of(score, inverse);
      }
      store_shared(passed.at(l, r), pack_moved(factor));
    }
  }
}

// The same where one warp has 16 keys: s becomes p, and factor_reg what the other warp is passed, as an A operand; of scores that have become what
// they do, unless SCORES is EXPRESSION. The log-sum-exp of the columns is read from shared memory when it is needed.
template <int N>
OP void probabilities(Acc<16, N>& s, OperandA<16> (&factor_reg)[N / 16], SharedAddress lse, const ScoreContext& x, const TransposedMask& mask,
                      bool masked, int first_row, int col0, float scale_log2, float softcap, const RowVec<16>& terms, const Regs<PairsOfLane<16, N>, 1>& taking_part,
                      bool ask_pairs = true) {
  const int row0 = not_ahead(first_row);
  const float inverse = SOFTCAP && softcap > 0.f ? (SCORES == EXPRESSION ? 1.f : LN2) / softcap : 0.f;
  for_lane(l) {
    ColumnRange queries[2];
    #pragma unroll
    for (int i = 0; i < 2; ++i) queries[i] = masked ? visible_in_row(mask, row0 + RowVec<16>::row(l, i)) : ColumnRange{0, x.q_len - 1};
    #pragma unroll
    for (int r = 0; r < s.regs; r += 4) {                     // two rows of two columns
      const Pair stat = load_shared<Pair>(lse + s.col(l, r) * 4);
      #pragma unroll
      for (int row = 0; row < 2; ++row) {
        float factor[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          float &score = s.at(l, r + 2 * row + i), became = score, slope = 1.f;
          bool takes = true;
          if (SCORES == EXPRESSION) {
            PairPlace at = place_of<true>(s, l, r + 2 * row + i, row0, col0);
            read_arrays(at, x, ask_pairs);
            takes = queries[row].first <= at.q_idx && at.q_idx <= queries[row].last;
            if (MASKED_PAIRS && ask_pairs) takes &= PAIR_BITS ? taking_part.at(l, 0) >> (r + 2 * row + i) & 1 : takes_part(at, x);
            became = score_of(score, at, x) * LOG2E, slope = slope_of(score, at, x);
          }
          if (SCORES == SCALED) slope = x.factor;
          const float p = takes ? exp2_approx(exponent(became, scale_log2, stat.x[i], terms.at(l, row))) : 0.f;
          factor[i] = p == 0.f ? 0.f : p * slope * bend_of(score, inverse);
          score = p;
        }
        factor_reg[r / 8].at(l, r / 4 % 2 * 2 + row) = pack<Element>(factor[0], factor[1]);
      }
    }
  }
}

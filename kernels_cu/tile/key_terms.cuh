// key_terms.cuh -- terms of the key alone: alone (PLUS_COLUMN), or beside a bias (HAS_KEY_TERM), such as that of keys that are padding beside the bias
// of pairs.
//
// Where rows are keys a term is what a row has in common. Where columns are, in fwd_hopper.cu, warps of the producer's group find it once for each key of
// a tile (`bring_terms` in tile/column_terms.cuh), and put it into shared memory beside the keys: alone it is a step of the product. Beside a bias
// that comes by TMA lanes read that of two neighbouring keys at once, and where S starts from the bias, it begins with the term,
//
//   S = T_j;  S = S + unit B_ij;  S = S + Q_i K_j^T
//
// so that a score costs a fourth of a read. In a step of the product it would take time of tensor cores.
#pragma once
#include "tile/bias_tile.cuh"

// PLUS_COLUMN, HAS_KEY_TERM: the term of a key, in natural units; and where rows are keys, that of each as the fragment has it, and a sum with it. It is added
// before scores are masked, so that what a masked key has there reaches nothing.
OP float term_of_key(const ScoreContext& x, int kv_idx) {
  PairPlace at{true, 0, kv_idx, float(kv_idx), 0.f, 0.f, 0.f, true};
  if constexpr (HAS_KEY_TERM) return key_term_of(at, x);
  read_arrays(at, x, false);
  return term_of(at, x);
}
constexpr bool TERMS_OF_KEYS = SCORES == PLUS_COLUMN || HAS_KEY_TERM;
template <int M> OP void terms_of_keys(RowVec<M>& terms, const ScoreContext& x, int row0) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < M / 8; ++i) terms.at(l, i) = term_of_key(x, row0 + RowVec<M>::row(l, i)) * x.unit;
  }
}
template <int M, int N> OP void add_to_rows(Acc<M, N>& s, const RowVec<M>& terms) {
  for_lane(l) {
    #pragma unroll
    for (int r = 0; r < s.regs; ++r) s.at(l, r) += terms.at(l, s.slot(r));
  }
}

// The same where columns are keys, and nobody has found their terms before: each lane those of a few, and the others ask it.
template <int N> OP void add_terms_of_keys(Acc<16, N>& s, const ScoreContext& x, int col0) {
  static_assert(N % 32 == 0, "a key for each lane");
  #pragma unroll
  for (int first = 0; first < N; first += 32) {
    Regs<float, 1> found;
    for_lane(l) found.at(l, 0) = term_of_key(x, col0 + first + l) * x.unit;
    #pragma unroll
    for (int r = first / 2; r < first / 2 + 16; r += 4) {     // two rows of two columns
      for_lane(l) {
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float term = value_of_lane(found, s.col(l, r + i) % 32);
          s.at(l, r + i) += term, s.at(l, r + i + 2) += term;
        }
      }
    }
  }
}

// Those of a tile: of a lane's keys, as the fragment has them.
struct KeyTerms {
  static constexpr int each = ceil_div(TILE_KV, 32);          // of a lane
  Regs<float, each> term;
};
// In shared memory, of a stage of keys.
struct StoredKeyTerms {
  typedef KeyTerms Found;
  static constexpr int bytes = TILE_KV * int(sizeof(float)), all_bytes = STAGES * bytes, end_as_operand = all_bytes;
  SharedAddress base;
  OP StoredKeyTerms(SharedAddress all, int stage, bool = false) : base(all + stage * bytes) {}
};

template <typename Params, typename Coord> OP void find_columns(KeyTerms& terms, const Params& p, const Coord& of_keys, int head, int first_key) {
  const ScoreContext x = score_context(p, of_keys, head, p.len_q, p.len_kv);
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < terms.each; ++i) terms.term.at(l, i) = term_of_key(x, first_key + 32 * i + l) * x.unit;
  }
}
OP void store(const StoredKeyTerms& to, const KeyTerms& terms) {
  for_lane(l) {
    #pragma unroll
    for (int i = 0; i < terms.each; ++i)
      if (32 * i + l < TILE_KV) store_shared(to.base + (32 * i + l) * int(sizeof(float)), terms.term.at(l, i));
  }
  sync_warp();                                                // without it one lane arrives before others have written
}

OP float load_common(const StoredKeyTerms&) { return 0.f; }

// Of the two keys of a lane in columns from `col` on.
OP Pair key_terms_at(SharedAddress of_lane, int col) { return load_shared<Pair>(of_lane + col * int(sizeof(float))); }
template <int N> OP SharedAddress key_terms_of_lane(const StoredKeyTerms& terms, const Acc<16, N>& s, int l) {
  return terms.base + not_ahead(s.col(l, 0)) * int(sizeof(float));                   // or each address would be found by itself
}
// S = T_j; without such terms S = 0.
template <int N, typename Stored> OP void begin_with_key_terms(Acc<16, N>& s, const Stored& terms) {
  if constexpr (HAS_KEY_TERM) {
    for_lane(l) {
      const SharedAddress from = key_terms_of_lane(terms, s, l);
      #pragma unroll
      for (int r = 0; r < s.regs; r += 4) {                   // two rows of two columns
        const Pair of = key_terms_at(from, s.reg_col(r));
        #pragma unroll
        for (int i = 0; i < 4; ++i) s.at(l, r + i) = of.x[i % 2];
      }
    }
  } else {
    fill(s, 0.f);
  }
}
// S = S + T_j + unit B_ij, of which the tile has the rows from row0 on: a few at a time, which take no registers for the whole tile.
template <int N, typename Tile, typename Stored> OP void add_bias_and_terms(Acc<16, N>& s, const Tile& tile, const Stored& terms, const ScoreContext& x, int row0) {
  if constexpr (HAS_KEY_TERM) {
    #pragma unroll
    for (int col = 0; col < N; col += 16) {
      BiasOf16x16<BiasElement> bias;
      load(bias, tile.bias(), row0, col);
      for_lane(l) {
        const SharedAddress from = key_terms_of_lane(terms, s, l);
        #pragma unroll
        for (int r = 0; r < 8; ++r) {
          PairPlace at{};
          at.bias = bias.of(l, r);
          s.at(l, col / 2 + r) += key_terms_at(from, col + r / 4 * 8).x[r % 2] + term_of(at, x);
        }
      }
    }
  }
}

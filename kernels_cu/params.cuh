// params.cuh -- what a kernel is told at launch: one struct per kernel family, passed by value.
// params.py mirrors each struct with a NumPy dtype; a test compares the two field by field.
#pragma once
#include "tile/scope.cuh"

constexpr int BATCH_AXES = 4;             // leading axes that could not be merged; unused ones have size 1 and stride 0

// What it takes to divide numbers below 2^31 by one that stays: n / divisor = (n * multiplier >> 32) >> shift. A multiplier of 0 divides by 1.
struct FastDivmod {
  u32 divisor, multiplier, shift;
};
OP u32 divide(u32 n, const FastDivmod& by) {
#if ON_GPU
  return by.multiplier ? __umulhi(n, by.multiplier) >> by.shift : n;
#else
  return by.multiplier ? u32(u64(n) * by.multiplier >> 32) >> by.shift : n;
#endif
}

// A strided array (*batch, heads, rows, cols). Strides count elements and may be 0 or negative.
struct Tensor {
  void* data;
  i64 batch_stride[BATCH_AXES];
  i64 head_stride;
  i64 row_stride;
  i64 col_stride;
};

// Which keys a query sees, see tile/mask.cuh. Lengths and bounds stay below 2^30. With 8 bytes beyond a multiple of 16, the fields behind it
// are loaded in the same pairs whatever masks are added.
struct alignas(8) MaskParams {
  int left;                               // query i sees the keys i + left ...
  int right;                              // ... to i + right, both included
  FastDivmod queries_divmod;              // PACK_GQA: queries of each head
  int prefix;                             // PREFIX: and the keys before this one
};

// Which pairs are dropped, see tile/dropout.cuh.
struct alignas(8) DropoutParams {
  u32 threshold;                          // a pair whose 15 random bits are below it
  float scale;                            // of those kept: 2^15 / (2^15 - threshold)
  u32 seed_low, seed_high, offset;
};

// An array that an expression reads, see tile/score.cuh.
constexpr int CAPTURED_AXES = 4;
constexpr int CAPTURED = 6;
struct CapturedArray {
  u64 data;                               // its address, or the bits of a scalar
  i64 stride[CAPTURED_AXES];              // in elements
  int extent[CAPTURED_AXES];
};

// Which tiles of pairs blocks visit, see tile/tile_list.cuh. Read by kernels with TILE_LIST.
struct TileLists {
  u32* lists;                             // (batch, heads, query tiles, 2, words)  bits of key tiles; in the backward of query tiles, for each key tile. PAIR_BITS: behind them those of pairs
  u32* columns;                           // (batch, heads, query tiles, words)  in the backward in order: bits of key tiles
  int batches, heads;                     // how many of them have lists of their own: all, or 1
};

// What becomes of scores besides scale, softcap, MaskParams and sinks. Read by kernels with SCORES, MASKED_PAIRS or DROPOUT.
struct ScoreParams {
  Tensor bias;                            // (*batch, heads, len_q, len_kv)
  Tensor pair_mask;                       // (*batch, heads, len_q, len_kv)  bool
  Tensor alibi_slopes;                    // (*batch, heads)
  CapturedArray captured[CAPTURED];       // what expressions read, in order
  const u64* seed;                        // (2)  seed and offset in device memory, or null: those of `dropout`
  DropoutParams dropout;
  TileLists tiles;
};

// Where the queries and keys of each batch element lie, see tile/sequence.cuh. Read by kernels with VARLEN, in device memory when they run.
struct SequenceParams {
  const void* offsets_q;                  // (sequences + 1)  rows of q and its like at which packed sequences begin; null: they are not packed
  const void* offsets_kv;                 // (sequences + 1)  the same of k and v
  const void* lengths_q;                  // (sequences)      how many rows of each are queries; null: all
  const void* lengths_kv;                 // (sequences)      how many are keys
  const void* cache_batch;                // (sequences)      which element of k and v is that of a sequence; null: that of its number
  const void* pages;                      // (sequences, pages_of_sequence)  PAGED: which page has its first keys, the next ones ...
  i64 k_page_stride, v_page_stride;       // in elements
  FastDivmod page_divmod;                 // keys of a page
  int pages_of_sequence;
  int sequences;
  int wide;                               // which of these arrays have 64 bits: a bit for each, in their order
  int moves;                              // whether MaskParams moves with a sequence: its last query sees what the last one of equal lengths would
  int rows_of_cache;                      // elements of k and v, or pages
};

// A query tile: of which sequence, and its first row there.
struct WorkItem {
  int sequence, row;
};
// The same with where the sequence lies: a persistent block between two tiles has no time to look for it.
struct alignas(16) PlacedWorkItem : WorkItem {
  int begin_q, len_q, room_q;             // rows as in SequenceRows, see tile/sequence.cuh
  int begin_kv, len_kv;
  u32 taken;                              // of the first one: how many tiles blocks have taken; SPLIT_KV: of the others, which split of the query tile, or WHOLE
};
// Of lists of tiles: the first row of a query tile.
struct ListedItem {
  int row;
  u32 taken;                              // of the first one: how many tiles blocks have taken; of the others: how many key tiles each has, until they are in order
};

// Of softcap * tanh(scale * s / softcap), in units of log 2: a polynomial in s * s + minus_square, times s, where that is below 0. See tile/softcap.cuh.
struct CapPolynomial {
  float minus_square;
  float factors[6];
};

struct ForwardParams {
  Tensor q;                               // (*batch, heads,    len_q,  dim)
  Tensor k;                               // (*batch, heads_kv, len_kv, dim)
  Tensor v;                               // (*batch, heads_kv, len_kv, dim_v)
  Tensor out;                             // (*batch, heads,    len_q,  dim_v)
  Tensor lse;                             // (*batch, heads,    len_q)  float32, or data = null when nobody asked for it
  float* state;                           // fwd_v1: O, l and m of all rows between two steps, in the order of fragments
  MaskParams mask;
  int batch[BATCH_AXES];
  int heads;
  int heads_per_kv;                       // query heads that share one key-value head
  int len_q, len_kv;
  int dim, dim_v;
  float scale;
  float softcap;                          // scores become softcap * tanh(score / softcap); 0 = no cap
  Tensor sinks;                           // (heads, sinks_of_head)  SINKS: of query heads, also where heads share tiles
  i64 sinks_of_head;
  ScoreParams scores;
  SequenceParams sequences;
  float* out_partials;                    // SPLIT_KV: (query tiles, splits, partial_rows, WIDTH_V)  out of each split
  float* lse_partials;                    // (query tiles, splits, partial_rows)  and its lse
  FastDivmod splits_divmod;               // blocks of a query tile
  FastDivmod tiles_divmod, heads_divmod;  // query tiles of a head; heads
  FastDivmod split_keys_divmod;           // keys of a split, at least, where there is more than one
  int split_tiles;                        // query tiles, of all heads and batch elements
  int partial_rows;                       // of a query tile that there is room for
  WorkItem* work;                         // VARLEN: how many query tiles there are, as a first sequence, and those of a head, see tile/schedule.cuh
  u64* arrivals;                          // LAST_COMBINES: (query tiles)  how many splits have been left, see tile/arrivals.cuh
  CapPolynomial cap;
};

// How TMA finds boxes of an array: on the GPU what the driver encodes (cuTensorMapEncodeTiled). Sizes from the fastest
// axis on: columns, rows, heads, and two batch axes, the last ones.
struct alignas(64) TensorMap {
  u64 words[16];
};

// What every fwd_hopper is told.
struct HopperForwardCommon {
  TensorMap q_map;                        // (*batch, heads,    len_q,  dim)    in boxes of 64 x 64
  TensorMap k_map;                        // (*batch, heads_kv, len_kv, dim)    in boxes of TILE_KV x 64
  TensorMap v_map;                        // (*batch, heads_kv, len_kv, dim_v)  the same
  TensorMap out_map;                      // TMA_STORE_OUT: out in boxes of 16 x 64
  Tensor lse;                             // (*batch, heads,    len_q)  float32, or data = null when nobody asked for it
  MaskParams mask;
  int batch[BATCH_AXES];
  int heads;
  int heads_per_kv;                       // query heads that share one key-value head
  int tiles;                              // of queries, of all heads and batch elements
  int run;                                // how many of them in a row a block takes: 1, or 2, a long and a short one
  int by_formula;                         // work tiles of a block before those in the table, or before its splits
  FastDivmod tiles_of_head_divmod;
  FastDivmod heads_divmod;
  int len_q, len_kv;
  int dim, dim_v;
  float scale;
  float softcap;
  int first_split_tile;                   // SPLIT_KV: number of the first query tile that is split
  int split_tiles;                        // how many are split
  int key_tiles_per_block;                // of their key tiles, one query tile's after the other's, so many for each block
  FastDivmod key_tiles_divmod;            // of a query tile
  int partial_rows;                       // of a tile that exist, rounded up to whole fragments
  float* out_partials;                    // (splits, partial_rows * WIDTH_V)  out of each split of a tile, in the order of fragments
  float* lse_partials;                    // (splits, partial_rows)  and its lse
  Tensor out;                             // (*batch, heads,    len_q,  dim_v)
  float scale_log2;                       // scale * log2 e
  Tensor sinks;                           // (heads, sinks_of_head)  SINKS: of query heads, also where heads share tiles
  i64 sinks_of_head;
  ScoreParams scores;
  FastDivmod in_turn_divmod;              // STAGED_BIAS: batch elements that share a bias and alternate; 1 if there are none
};

constexpr int TABLE_BLOCKS = 136;
constexpr int TABLE_TILES = 9;
constexpr u16 NO_TILE = 0xffff;
struct HopperForwardParams : HopperForwardCommon {
  TensorMap bias_map;                     // STAGED_BIAS: the bias in boxes of TILE_Q x 64
  u16 table[TABLE_BLOCKS][TABLE_TILES];   // for each block its last work tiles, by their distance from the first of all of them, then NO_TILE
  ListedItem* work;                       // IN_TURN: (batch, 1 + query tiles of a head)  those with most key tiles first, see tile/listed_work.cuh
  FastDivmod heads_together_divmod;       // heads that take turns with them, before the next ones do; they divide `heads`
  CapPolynomial cap;                      // CAPPED
};
static_assert(sizeof(HopperForwardParams) <= 4096, "what a kernel can be passed by every driver");

// The same with VARLEN, where query tiles are found on the device.
struct HopperVarlenParams : HopperForwardCommon {
  SequenceParams sequences;
  PlacedWorkItem* work;                   // how many query tiles there are, and how many of these have queries, as a first sequence and row; then those of a head
  FastDivmod heads_together_divmod;       // heads that take turns with the tiles of this list, before the next ones do; they divide `heads`
  Tensor k, v;                            // COPIED_PAGES
  TensorMap bias_map;                     // STAGED_BIAS: the bias in boxes of TILE_Q x 64
  CapPolynomial cap;                      // CAPPED
  FastDivmod split_keys_divmod;           // SPLIT_KV: keys of a split, at least, of a sequence that has several
  u32 most_splits;                        // of a query tile
};
static_assert(sizeof(HopperVarlenParams) <= 4096, "what a kernel can be passed by every driver");

struct BackwardParams {
  Tensor q;                               // (*batch, heads,    len_q,  dim)
  Tensor k;                               // (*batch, heads_kv, len_kv, dim)
  Tensor v;                               // (*batch, heads_kv, len_kv, dim_v)
  Tensor out;                             // (*batch, heads,    len_q,  dim_v)  as the forward left it
  Tensor lse;                             // (*batch, heads,    len_q)  float32
  Tensor dout;                            // (*batch, heads,    len_q,  dim_v)
  Tensor dlse;                            // (*batch, heads,    len_q)  float32, or data = null: zero
  Tensor dq;                              // (*batch, heads,    len_q,  dim)    a stride of 0 along a batch axis means: summed over it
  Tensor dk;                              // (*batch, heads_kv, len_kv, dim)    the same
  Tensor dv;                              // (*batch, heads_kv, len_kv, dim_v)  the same
  float* stats;                           // (batch, heads, query tiles, STATS, TILE_Q)  log2-sum-exp2 of the scores; rowsum(dout * out) - dlse; BENDS: the first beyond a diagonal
  float* dq_accum;                        // (heads that have sums at a time, query tiles, TILE_Q * WIDTH)  in the order of fragments
  float* dk_accum;                        // (batch, heads_kv, splits, key tiles, TILE_KV * WIDTH)  the same, or null: dk is stored at once
  float* dv_accum;                        // the same for dv
  u32* dq_semaphore;                      // (batch, heads, query tiles)  key tiles that have been added to dq_accum, or null: in any order
  u32* dq_progress;                       // (batch, heads)  what has been done for dq, see DqProgress; null: the postprocess kernel makes dq, or (WHOLE_HEADS) nothing has to be known
  MaskParams mask;
  int batch[BATCH_AXES];
  int heads;
  int heads_per_kv;                       // query heads that share one key-value head
  int heads_per_block;                    // of those, how many one block sums over: heads_per_kv / splits
  int heads_together;                     // heads whose key tiles neighbouring blocks take one after the other
  int len_q, len_kv;
  int dim, dim_v;
  float scale;
  float softcap;
  Tensor sinks;                           // (heads, sinks_of_head)  SINKS
  void* dsinks;                           // (sinks_of_head, heads)  their gradient
  i64 sinks_of_head;
  ScoreParams scores;
  SequenceParams sequences;
  CapPolynomial cap;
  float per_softcap;                      // ln 2 / softcap; 0 = no cap
};

// VARLEN: where the keys of a block lie, see tile/key_places.cuh.
struct alignas(16) KeyPlace {
  int left, right, len_q, len_kv, prefix; // a TransposedMask, see tile/mask.cuh
  int begin_q, room_q;                    // rows as in SequenceRows, see tile/sequence.cuh
  u32 first_number;                       // of the query tiles of the sequence, in head 0
  int begin_kv, room_kv;
  u32 batch_number;                       // number of the sequence,
  int batch[2];                           // and its indices on the last two batch axes
  int tile;                               // of its keys, or below 0: no sequence has the tile
  int first, count;                       // the first query tile that sees one of them, and how many do
};

struct BackwardMaps {
  TensorMap q_map;                        // q in boxes of TILE_Q x 64
  TensorMap k_map;                        // k in boxes of TILE_KV x 64
  TensorMap v_map;                        // v, the same
  TensorMap dout_map;                     // dout in boxes of TILE_Q x 64
  TensorMap dq_map;                       // dq in boxes of 16 x 64
  TensorMap dk_map;                       // dk, the same
  TensorMap dv_map;                       // dv, the same
  TensorMap bias_map;                     // STAGED_BIAS: the bias in boxes of TILE_Q x 64
};
struct HopperBackwardParams : BackwardMaps, BackwardParams {
  FastDivmod heads_together_divmod;       // heads_together
  FastDivmod group_divmod;                // times the key tiles of a head: what neighbouring blocks share out
  FastDivmod units_divmod;                // units of one batch element: heads / heads_per_block
  FastDivmod heads_per_kv_divmod;
  FastDivmod accum_heads_divmod;          // heads, of all batch elements, that have a dq_accum at a time: the next ones use it again
  u32 owners;                             // blocks that own keys; those beyond make dq of the last heads
  u32 last_heads;                         // where these begin, counted over all batch elements
  u32 reused;                             // heads before this one leave their dq_accum to others,
  u32 cleared_after;                      // blocks of heads that come so many heads later having cleared them
  u32 backwards;                          // blocks of heads before this one take the last keys first
  u32 first_tiles;                        // TILE_LIST: so many blocks come before all others, and have the first keys of all units
  KeyPlace* key_places;                   // VARLEN: (batch elements of k, key tiles)
  TensorMap dbias_map;                    // STORE_DBIAS: the gradient of the bias in boxes of TILE_Q x 64
  u32* next_tile;                         // PERSISTENT: (1)  how many key tiles blocks have taken, or WHOLE_HEADS, how many heads
  u32 finishing;                          // PERSISTENT: blocks behind those that take key tiles
  u32 heads_ahead;                        // STATS_AHEAD, ZEROS_AHEAD: blocks of a head make stats, or zeros, of the head so many later; the first launch those of as many first heads
  u32* stats_progress;                    // STATS_AHEAD: (batch, heads)  of the first head of a block: warps that have made their part of the stats
  TensorMap out_map;                      // STATS_AHEAD: out in boxes of TILE_Q x 64
  u32* zeros_progress;                    // ZEROS_AHEAD: (batch, heads)  of the first head of a block: blocks that have made their part of the sums zero
  u32 makers;                             // VARLEN, STATS_AHEAD: how many key tiles of a head, counted over all sequences, make something for a later one
};

// For the gradient of an array that scores read. Its elements may belong to batch elements, heads, queries and keys; over what they do not, it is
// summed. The stats are those that the backward has left.
struct ScoreGradientParams : BackwardParams {
  Tensor gradient;                        // (*batch, heads, len_q, len_kv)  a stride of 0 means: summed; GATHERED, of `places`; SCATTERED, only 0 counts
  i64 head_kv_stride;                     // the same of key-value heads
  float* places;                          // GATHERED: what each query, key or distance of those batch elements and heads adds to whatever it reads
  i64 first_element;                      // what indices that are numbers add to its offsets
  float* partials;                        // (units, splits, parts of a block, sums of a unit)  see tile/element_sums.cuh
  float* sums;                            // (elements)  in float32, where several kernels or blocks add to one element
  i64 elements;                           // of the array
  int through_sums;                       // whether there are sums, from which the gradient is made
  int batch_summed[BATCH_AXES];           // batch elements along each axis that share the elements of a unit: 1 or all
  int heads_summed;                       // heads that do: 1, heads_per_kv or all
  u32 splits;                             // blocks of a unit
  u32 parts;                              // of all units
  FastDivmod stats_rows_divmod;           // TILE_Q of the backward
  float delta_sign;                       // what its delta is multiplied by
  int elements_q, elements_kv;            // VARLEN: of the axes of queries and keys; CLAMPED: pairs beyond the last one read that
};

// The same of bwd_scores_hopper.cu.
struct HopperScoreGradientParams : ScoreGradientParams {
  FastDivmod splits_divmod;               // splits
  FastDivmod key_tiles_divmod, query_tiles_divmod, owner_heads_divmod;        // of a unit's number: tiles of a head, and heads that have units of their own
  i64 walked;                             // batch elements and heads that share a unit
  TensorMap q_map;                        // q in boxes of TILE_Q x 64
  TensorMap k_map;                        // k in boxes of TILE_KV x 64
  TensorMap v_map;                        // v, the same
  TensorMap dout_map;                     // dout in boxes of TILE_Q x 64
  TensorMap bias_map;                     // STAGED_BIAS: the bias in boxes of TILE_Q x 64
};

// out = the attention over the keys of a and of b together, from the attention over each.
struct MergeParams {
  Tensor out_a, out_b, out;               // (*batch, heads, len_q, dim_v)
  Tensor lse_a, lse_b, lse;               // (*batch, heads, len_q)  float32
  int batch[BATCH_AXES];
  int heads;
  int len_q;
  int dim_v;
};

// Which tiles have a pair that takes part, and in which all pairs do: what kernels with TILE_LIST are told, in their tiles.
struct ClassifyParams {
  MaskParams mask;
  int batch[BATCH_AXES];                  // of those that have lists of their own
  int heads_per_kv;
  int len_q;
  int len_kv;
  int tile_q;
  int tile_kv;
  int by_keys;                            // whether lists are of key tiles, as in the backward
  int others;                             // tiles that a list names some of
  FastDivmod words_divmod;                // words of a row of a list
  FastDivmod tiles_divmod, heads_divmod;  // lists of a head; heads that have lists of their own
  ScoreParams scores;
};

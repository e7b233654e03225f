// config.cuh -- every compile-time knob. Knobs choose speed, registers and shared memory; the result is the same function.
// These defaults let each .cu compile alone. The planner hands the compiler this same text with its own values in place of them.
#pragma once

enum Dtype { FLOAT16, BFLOAT16, FLOAT32 };
enum MaskKind { BAND, PREFIX };           // see tile/mask.cuh
enum SinkKind { NO_SINKS, SINKS_OF_DTYPE, SINKS_FLOAT32 };
enum ScoreKind { UNCHANGED, PLUS_TERM, PLUS_LINEAR, PLUS_COLUMN, SCALED, EXPRESSION };     // see tile/score_context.cuh

constexpr int   ARCH = 80;                // 10 * compute capability: from 80 on m16n8k16, tf32, cp.async and packed conversions exist
constexpr Dtype DTYPE = FLOAT16;          // of q, k, v and out
constexpr int   TF32_PASSES = 3;          // float32 products from ARCH 80 on: 3 keeps float32 accuracy (3xTF32), 1 rounds the operands to tf32

constexpr int   FP16_PARTS = 0;           // fwd_hopper, bwd_hopper_parts: float16 numbers in place of each element of q, k, v and dout, which are float32, see tile/fp16_parts.cuh: 2 keep its accuracy in three products (3xFP16), 1 rounds it as tf32 does; 0: elements are what they are

constexpr MaskKind MASK = BAND;           // which keys a query sees
constexpr SinkKind SINKS = NO_SINKS;      // logits of each row besides those of its keys, see tile/sinks.cuh: none, in the dtype of q, or in float32
constexpr bool  SEVERAL_SINKS = false;    // of SINKS, forward: a row may have none, or more than one; so also PLUS_TERM, which spills in the other text

constexpr ScoreKind SCORES = UNCHANGED;   // what becomes of scores: nothing; a term is added that does not depend on them, such as a bias, or that is linear in the places of a pair, or depends on the key alone; they are scaled; or any expression, which needs EXPLICIT_SCORES
constexpr bool  MASKED_PAIRS = false;     // pairs are masked by an expression or an array as well
constexpr bool  VARLEN = false;           // batch elements have lengths of their own, packed or padded, see tile/sequence.cuh
constexpr bool  PAGED = false;            // of VARLEN: keys and values lie in pages
constexpr bool  CACHED = false;           // of VARLEN, fwd_hopper: keys and values of a sequence are an element of a cache, whose number the call says
constexpr int   PIECE = 0;                // of PAGED, fwd_hopper: keys that TMA brings at a time, which divide a page and a tile; 0 where no 8 of them do: lanes copy keys and values
constexpr int   PRODUCER_WARPS = 1;       // fwd_hopper: warps that bring keys and values; of PAGED half of them keys and half values: one alone takes longer to start many small copies than consumers take to read what they bring
constexpr bool  TILE_LIST = false;        // of MASKED_PAIRS: blocks visit the tiles of a list, see tile/tile_list.cuh
constexpr bool  IN_TURN = false;          // of TILE_LIST, fwd_hopper: blocks take query tiles in turn, those with most key tiles first, see tile/listed_work.cuh
constexpr bool  OWN_LISTS = false;        // of TILE_LIST, fwd_hopper: each consumer has a list for its rows, see tile/consumer_lists.cuh; if not, a query tile has one
constexpr bool  PAIR_BITS = false;        // of TILE_LIST, kernels for sm_90a: which pairs take part has been found before, and is read, see tile/pair_bits.cuh; if not, the mask is asked
constexpr bool  DROPOUT = false;          // probabilities are dropped, see tile/dropout.cuh
constexpr bool  PLACED = false;           // of DROPOUT: pairs are numbered from elsewhere than the first query, key and head, as a part of a problem that several devices share

constexpr bool  FLOAT32_RESULTS = false;  // out, or dq, dk and dv, are float32 whatever DTYPE is: parts of a result, rounded when all are together
constexpr bool  ADD_RESULTS = false;      // of FLOAT32_RESULTS: dq, dk and dv are added to what is there

constexpr int   TILE_Q = 128;             // query rows a block owns; in the backward, query rows per step
constexpr int   TILE_KV = 64;             // key rows per step of the KV loop; in the backward, key rows a block owns
constexpr int   Q_TILES = 4;              // fwd_v1: query tiles a block owns
constexpr int   WIDTH = 64;               // head dim, rounded up to a multiple of 32; columns beyond the true dim are zero
constexpr int   WIDTH_V = 64;             // the same for the head dim of v and out
constexpr int   DIM = 64;                 // fwd_hopper, bwd_hopper, bwd_hopper_wide: of WIDTH, those that products take, the head dim rounded up to a multiple of 16; elsewhere WIDTH
constexpr int   DIM_V = 64;               // the same of WIDTH_V
constexpr int   WARPS = 4;                // each owns TILE_Q / WARPS query rows: 16 or 32; in the backward a pair owns 2 TILE_KV / WARPS key rows: 16, 32 or 64;
                                          // in fwd_hopper a producer warpgroup loads, and each consumer warpgroup owns 64 query rows
constexpr int   WARPS_KV = 1;             // fwd_v2: warps among which each key tile is dealt out: 1, so that warps see all keys and have rows of their own; or WARPS, so that all have the same few rows, and 16 keys or more of each tile
constexpr int   STAGES = 2;               // tiles of K and V, in the backward of Q and dO, in flight or in use
constexpr int   STAGES_V = 2;             // fwd_hopper: tiles of V in flight or in use; STAGES are those of K
constexpr int   STAGES_Q = 2;             // fwd_hopper: stages of 64 queries each; with more than consumer warpgroups, a query tile begins beneath the end of the one before
constexpr bool  TMA_STORE_OUT = false;    // fwd_hopper: out goes through shared memory, and TMA stores it; if not, lanes store what they hold
constexpr bool  STAGED_BIAS = false;      // fwd_hopper, bwd_hopper: a bias comes by TMA, see tile/bias_tile.cuh; if not, lanes read what they need of it
constexpr bool  STORE_DBIAS = false;      // of STAGED_BIAS, bwd_hopper: its gradient is dS, each element of which is a pair's own, and TMA stores it; if not, bwd_scores computes it
constexpr int   CLUSTER = 1;              // of STORE_DBIAS, bwd_hopper: so many batch elements share the bias, whose blocks are a cluster and sum up dS, see tile/dbias_sums.cuh; if 1, it is each element's own
#define IN_CLUSTERS                       // what such a kernel has before its name: CLUSTERS_OF(CLUSTER), or nothing
constexpr bool  PINGPONG = false;         // fwd_hopper: warpgroups start the products of a step one after the other (ping-pong)
constexpr bool  TMA_REDUCE_DQ = false;    // bwd_hopper: dQ goes through shared memory, and TMA adds it; if not, lanes add what they hold
constexpr bool  SCALE_SUMS = false;       // of SCALED, bwd_hopper, _wide: what scores of a head are multiplied by multiplies dQ and dK when they are summed up; if not, each dS, since several heads share dK
constexpr bool  PERSISTENT = false;       // of TILE_LIST or WHOLE_HEADS, bwd_hopper: as many blocks as multiprocessors take one key tile after the other; if not, each has one
constexpr bool  WHOLE_HEADS = false;      // of PERSISTENT: all key tiles of a head are for one block, which nobody shares sums of dQ with; if not, blocks of a head add to the same
constexpr bool  ZEROS_AHEAD = false;      // bwd_hopper, _wide: an idle warp makes the sums of later heads zero, see tile/dq_protocol.cuh; if not, the preprocess kernel makes all
constexpr bool  STATS_AHEAD = false;      // bwd_hopper: idle warps make the statistics of queries of later heads, see tile/stats_ahead.cuh; if not, the preprocess kernel makes all
constexpr bool  FIRST_STORES = false;     // bwd_hopper, _wide, where dQ is summed in order: the first block to add stores, and no sums have to be zero before, but those that no block adds to
constexpr bool  IN_ORDER = false;         // of STATS_AHEAD: dQ is summed in order, which takes two of the warps that are idle otherwise
constexpr bool  FROM_LAST = false;        // fwd_hopper: where a linear term makes scores larger from a key to the next, the last key tiles first
constexpr bool  SPLIT_KV = false;         // query tiles are split along the keys among blocks: in fwd_hopper those that whole rounds leave over, in fwd_v2 those of few queries
constexpr bool  UNLISTED = false;         // of VARLEN, fwd_hopper: so few query tiles, or splits of them, that each block has one at most, and finds it by its number; if not, blocks take them from a list
constexpr bool  LAST_COMBINES = false;    // of SPLIT_KV, fwd_v2: the block of a query tile that ends last combines its splits; if not, a kernel behind does
constexpr bool  PACK_GQA = false;         // forward: the heads of a group share query tiles, so that row i is query i % queries of some head
constexpr int   INNER_HEADS = 1;          // of VARLEN, fwd_hopper: neighbouring rows of a query tile are so many heads of a group, with one query; 1: rows are queries of one head
constexpr int   MIN_BLOCKS = 2;           // blocks an SM should hold: caps the registers of a thread

constexpr int   COPY_BYTES = 16;          // bytes moved at once between device memory and shared memory or registers: 16, 8, 4, or 0 for one element; divides every row
constexpr bool  Q_IN_REGISTERS = false;   // keep the query operand in registers instead of reading it again for each KV tile
constexpr bool  LAZY_RESCALE = true;      // leave O alone in a step where no row of the warp has a new maximum
constexpr bool  SOFTCAP = true;           // there may be a softcap, which is asked when the kernel runs; false beside an expression, or where scores are scaled one by one, if there is none
constexpr bool  EXPLICIT_SCORES = false;  // scale (and softcap) each score before the maximum: for softcap, and for scale <= 0 or large

constexpr bool  ROTATE_Q = false;         // append: queries of the new rows are rotated as well

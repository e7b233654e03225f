// forward_memory.cuh -- what fwd_hopper.cu keeps in shared memory, and where.
#pragma once
#include "tile/bias_tile.cuh"
#include "tile/linear_terms.cuh"
#include "tile/fp16_parts.cuh"
#include "tile/pipeline.cuh"
#include "tile/work.cuh"

using KeyTile = MaybeWithBias<OperandTile<TILE_KV, DIM>>;
using ValueTile = OperandTile<TILE_KV, DIM_V>;
using QueryTile = OperandTile<ROWS, DIM>;
constexpr int P_OPERANDS = max_of(FP16_PARTS, 1) * TILE_KV / 16;
using OutTile = PanelTile<ROWS, DIM_V>;
static_assert(ceil_div(DIM, 64) == ceil_div(WIDTH, 64) && ceil_div(DIM_V, 64) == ceil_div(WIDTH_V, 64), "products take some columns of every panel");
using Queries = Pipeline<QueryTile, STAGES_Q, ELECT_ONE>;

// Queries, 64 rows of them in each stage; rows of out that leave, for each warpgroup; K; V; terms; barriers; work descriptors;
// descriptors of sequences; the barrier of a tile of V that is clipped, and behind it the query tile taken; numbers of key tiles.
constexpr int OUT_OFFSET = STAGES_Q * QueryTile::bytes;
constexpr int K_OFFSET = OUT_OFFSET + TMA_STORE_OUT * GROUPS * OutTile::bytes;
constexpr int V_OFFSET = K_OFFSET + STAGES * KeyTile::bytes;
constexpr int TERMS_OFFSET = V_OFFSET + STAGES_V * ValueTile::bytes;
constexpr int K_BARRIERS = TERMS_OFFSET + (TERMS_IN_PRODUCT || HAS_KEY_TERM) * StoredTerms::all_bytes;
constexpr int V_BARRIERS = K_BARRIERS + STAGES * STAGE_BARRIERS;
constexpr int Q_BARRIERS = V_BARRIERS + STAGES_V * STAGE_BARRIERS;
constexpr int WORK_OFFSET = Q_BARRIERS + STAGES_Q * STAGE_BARRIERS;
constexpr int SEQUENCES_OFFSET = WORK_OFFSET + STAGES_Q * int(sizeof(WorkDescriptor));
constexpr int CLIPPED_BARRIER = SEQUENCES_OFFSET + VARLEN * STAGES_Q * int(sizeof(SequenceDescriptor));
constexpr int NUMBERS_OFFSET = CLIPPED_BARRIER + (VARLEN + PAGED) * Mbarrier::bytes; // last: what lies behind them would not be aligned
constexpr int ALL_BYTES = NUMBERS_OFFSET + TILE_LIST * STAGES * TOLD_WORDS * int(sizeof(u32));
constexpr int MOST_BYTES = 227 * 1024;                        // of a block; with terms of keys at dim 256 that is 144 too few for compute-sanitizer
constexpr int SHARED_BYTES = TERMS_IN_PRODUCT ? max_of(ALL_BYTES, min_of(TERMS_OFFSET + StoredTerms::end_as_operand, MOST_BYTES)) : ALL_BYTES;
static_assert(!(OWN_LISTS && OWN_SUMS), "of a tile that is passed by, sums would not join those of others");
static_assert(!(PAGED || CACHED || INNER_HEADS > 1) || !FP16_PARTS, "parts are made of rows that lie in a line, of which neighbours have one scale");
static_assert(!(OWN_LISTS && DROPOUT), "of a tile that is passed by, P would be dropped from twice");
static_assert(!OWN_LISTS || NUMBERS_OFFSET % int(sizeof(ToldWords)) == 0, "words of all consumers leave at once");
OP SharedAddress number_of(SharedAddress memory, int stage, int consumer = 0) {
  return memory + NUMBERS_OFFSET + (OWN_LISTS ? consumer : 0) * int(sizeof(u32)) + stage * TOLD_WORDS * int(sizeof(u32));
}

// The 16 rows of a warp go to `row` on of out, through the room of its warpgroup, as soon as TMA has time.
template <typename Coord> OP void store_out_async(const TensorMap& map, const Coord& here, int row, SharedAddress memory, const Acc<16, DIM_V>& o) {
  const int warp = not_ahead(warp_id());
  const OutTile out_smem{memory + OUT_OFFSET + (warp / 4 - 1) * OutTile::bytes};
  wait_for_stores();                                          // without it rows are overwritten that have not left
  store(out_smem, o, warp % 4 * 16);
  fence_proxy_async();                                        // without it rows leave that have not been written
  store_async(map, here.batch, here.head, row, out_smem, warp % 4 * 16);
}

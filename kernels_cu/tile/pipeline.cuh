// pipeline.cuh -- mbarriers, TMA, and the pipelines in which a producer has TMA bring tiles and consumers read them. (PTX ISA, "mbarrier" and
// "Tensor Copies"; names as in CUTLASS.)
#pragma once
#include "params.cuh"
#include "tile/panel.cuh"

// A phase of an mbarrier is complete when `count` warps have arrived and every byte that they announced has come; then the next one begins.
// Whoever waits names the phase by its parity: 0 for the first, 1 for the second, 0 again for the third.
struct Mbarrier {
  static constexpr int bytes = 8;
  SharedAddress address;
};

// How the lanes of a warp go through a wait or an arrival; results are the same, and which is faster depends on the kernel, by up to a tenth.
//   DIVERGENT    by branches around the instruction
//   CONVERGENT   without a branch at which the assembler would let lanes part. Where that holds for a whole kernel, its loop counters,
//                addresses and descriptors are in uniform registers
//   ELECT_ONE    the same, and elect.sync chooses the lane that starts a copy, or arrives: where a lane is chosen by its number, the assembler
//                does not know that it is one lane, and makes a loop around each copy; and it reads the number again, which is waited for
enum Lanes { DIVERGENT, CONVERGENT, ELECT_ONE };

// Who arrives when keys or values are on their way: the warps that bring them, or of lanes that copy each by itself.
constexpr int TILE_LOADERS = max_of(PRODUCER_WARPS / 2, 1);    // warps that bring a tile together; of several, half bring keys and half values
constexpr bool COPIED_PAGES = PAGED && PIECE == 0;
constexpr int PRODUCER_ARRIVALS = COPIED_PAGES && ON_GPU ? 32 * TILE_LOADERS : TILE_LOADERS;

#if ON_GPU
OP bool mbarrier_try_wait_parity(SharedAddress barrier, u32 phase) {
  u32 open;
  asm volatile("{ .reg .pred open; mbarrier.try_wait.parity.shared::cta.b64 open, [%1], %2; selp.u32 %0, 1, 0, open; }"
               : "=r"(open) : "r"(barrier), "r"(phase) : "memory");
  return open;
}
// the same in a loop until it is open, whose branches are told to be taken by all lanes
OP void mbarrier_try_wait_parity_uni(SharedAddress barrier, u32 phase) {
  asm volatile("{ .reg .pred open; again: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1; @open bra.uni done; bra.uni again; done: }"
               :: "r"(barrier), "r"(phase) : "memory");
}
OP void mbarrier_init(SharedAddress barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
OP void mbarrier_arrive(SharedAddress barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory"); }
// by the lanes of which it is true
OP void mbarrier_arrive_if(SharedAddress barrier, bool calls) {
  asm volatile("{ .reg .pred calls; setp.ne.u32 calls, %1, 0; @calls mbarrier.arrive.shared::cta.b64 _, [%0]; }"
               :: "r"(barrier), "r"(u32(calls)) : "memory");
}
// arrives when what the lane has copied by cp.async has come
OP void cp_async_mbarrier_arrive_noinc(SharedAddress barrier) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory"); }
OP void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// true in one lane of the warp
OP bool elect_sync() {
  u32 elected;
  asm volatile("{ .reg .pred elected; elect.sync _|elected, 0xffffffff; selp.u32 %0, 1, 0, elected; }" : "=r"(elected));
  return elected;
}
OP void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
OP void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
OP void cp_async_bulk_tensor_5d(SharedAddress dst, const TensorMap& map, SharedAddress barrier, int col, int row, int head, int b1, int b0) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               :: "r"(dst), "l"(&map), "r"(barrier), "r"(col), "r"(row), "r"(head), "r"(b1), "r"(b0) : "memory");
}
OP void cp_async_bulk(SharedAddress dst, const void* src, u32 bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}
OP void cp_async_bulk_tensor_5d_store(const TensorMap& map, SharedAddress src, int col, int row, int head, int b1, int b0) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :: "l"(&map), "r"(src), "r"(col), "r"(row), "r"(head), "r"(b1), "r"(b0) : "memory");
}
OP void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
OP void cp_async_bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
OP void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
OP void cp_async_bulk_store(float* dst, SharedAddress src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}
OP void cp_reduce_async_bulk_add(float* dst, SharedAddress src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}
template <int REGISTERS> OP void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
template <int REGISTERS> OP void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS)); }
#else
// What a TensorMap holds on the host, in the clear (tensor_map.py): strides in bytes of all axes but the fastest.
struct ClearMap {
  char* data;
  i64 stride[4];
  int size[5];
  int box_rows, box_cols, box_heads;                          // of the rows, so many heads have as many each
};
static_assert(sizeof(ClearMap) <= sizeof(TensorMap));

// Rows of 128 bytes of an array, from [b0, b1, head, row, col] on, and their place in a panel in shared memory.
struct Box {
  ClearMap map;
  SharedAddress in_panel;
  int start[5];
  CallSite at;

  Box(const TensorMap& given, SharedAddress in_panel, int rows, int col, int row, int head, const int (&batch)[BATCH_AXES], CallSite at, int cols = 64)
      : in_panel(in_panel), start{col, row, head, batch[BATCH_AXES - 1], batch[BATCH_AXES - 2]}, at(at) {
    std::memcpy(&map, &given, sizeof map);
    if (map.box_rows != rows || map.box_cols != cols) host::self->fail_by_box(rows, cols, map.box_rows, map.box_cols, at);
    if ((in_panel - shared_memory()) % 1024) host::self->fail("moves a box at an address that is no multiple of 1024", at);
  }
  // Calls move(chunk, in_array, bytes) for every 16 bytes of the box: so many of them lie in the array. A row of the panel has 128 bytes,
  // its chunks xor-ed with the row.
  template <typename Move> void for_chunks(Move move) const {
    char* first = map.data;
    bool exists = true;
    for (int axis = 3; axis < 5; ++axis) {
      first += start[axis] * map.stride[axis - 1];
      exists &= u32(start[axis]) < u32(map.size[axis]);       // nor before the array
    }
    const int of_chunk = map.box_cols / 8, bytes = 16 / of_chunk, of_head = map.box_rows / map.box_heads; // columns of a chunk, and bytes of each
    for (int r = 0; r < map.box_rows; ++r)
      for (int c = 0; c < 8; ++c) {
        const int row = start[1] + r % of_head, head = start[2] + r / of_head, col = start[0] + of_chunk * c;
        const int cols = exists && u32(head) < u32(map.size[2]) && u32(row) < u32(map.size[1]) ? min_of(max_of(map.size[0] - col, 0), of_chunk) : 0;
        move(in_panel + r * 128 + (c ^ r % 8) * 16, cols ? first + head * map.stride[1] + row * map.stride[0] + col * bytes : nullptr, cols * bytes);
      }
  }
  void load() const {
    check_shown("has TMA overwrite");
    for_chunks([](SharedAddress chunk, const char* from, int bytes) {
      count_read(bytes);
      if (bytes) std::memcpy(chunk, from, bytes);
      std::memset(chunk + bytes, 0, 16 - bytes);
    });
  }
  void store() const {
    for_chunks([](SharedAddress chunk, char* to, int bytes) {
      count_written(bytes);
      if (bytes) std::memcpy(to, chunk, bytes);
    });
  }
  void check_shown(const char* who) const { host::self->check_shown(in_panel, map.box_rows * 128, who, at); }
};
#endif

// One of several warps does it, once; all warps see it after sync_block.
OP void init_mbarrier(Mbarrier barrier, int count, CallSite at = call_site()) {
#if ON_GPU
  if (lane_id() == 0) {
    mbarrier_init(barrier.address, count);
    fence_mbarrier_init();
  }
#else
  host::init_mbarrier(warp_id(), barrier.address, count, at);
#endif
}
template <Lanes LANES = DIVERGENT> OP void arrive_at(Mbarrier barrier, CallSite at = call_site()) {
#if ON_GPU
  if constexpr (LANES == ELECT_ONE) mbarrier_arrive_if(barrier.address, elect_sync());
  else if constexpr (LANES != DIVERGENT) mbarrier_arrive_if(barrier.address, lane_id() == 0);
  else if (lane_id() == 0) mbarrier_arrive(barrier.address);
#else
  host::arrive(warp_id(), barrier.address, 0, at);
#endif
}
// arrives, and announces bytes that TMA will bring
OP void arrive_expect_tx(Mbarrier barrier, int bytes, CallSite at = call_site()) {
#if ON_GPU
  if (lane_id() == 0) mbarrier_arrive_expect_tx(barrier.address, bytes);
#else
  host::arrive(warp_id(), barrier.address, bytes, at);
#endif
}
template <Lanes LANES = DIVERGENT> OP void wait_for(Mbarrier barrier, u32 phase, CallSite at = call_site()) {
#if ON_GPU
  if constexpr (LANES != DIVERGENT) mbarrier_try_wait_parity_uni(barrier.address, phase);
  else while (!mbarrier_try_wait_parity(barrier.address, phase)) {}
#else
  host::wait_for_mbarrier(warp_id(), barrier.address, phase, at);
#endif
}

// DEPTH stages, each a tile and two mbarriers: `full` counts the producers and the bytes of the tile, `empty` the consumer warps that have read
// it. Each side has a copy of its own, whose count of tiles says which stage and which phase is at hand.
constexpr int STAGE_BARRIERS = 2 * Mbarrier::bytes;           // bytes of the two of a stage
template <typename T, int DEPTH, Lanes LANES = DIVERGENT> struct Pipeline {
  typedef T Tile;
  static constexpr int depth = DEPTH;
  SharedAddress tiles, barriers;
  u32 count = 0;                                              // of tiles before the one at hand; a block goes through fewer than 2^32
  OP Pipeline(SharedAddress tiles, SharedAddress barriers) : tiles(tiles), barriers(barriers) {}
  OP int stage() const { return int(count % DEPTH); }
  OP u32 phase() const { return count / DEPTH % 2; }          // of both mbarriers of the stage; the producer waits for the one before
  OP Tile tile() const { return {tiles + stage() * Tile::bytes}; }
  OP Mbarrier full() const { return {barriers + stage() * STAGE_BARRIERS}; }
  OP Mbarrier empty() const { return {barriers + stage() * STAGE_BARRIERS + Mbarrier::bytes}; }
  OP void advance() { ++count; }
};
// By one warp, before a sync_block: a stage is full when so many producers have arrived, and empty again when `readers` warps have released it.
template <typename T, int DEPTH, Lanes LANES> OP void init_pipeline(Pipeline<T, DEPTH, LANES> pipeline, int readers, int producers = 1, CallSite at = call_site()) {
  for (int i = 0; i < DEPTH; ++i, pipeline.advance()) {
    init_mbarrier(pipeline.full(), producers, at);
    init_mbarrier(pipeline.empty(), readers, at);
  }
}
// What the lanes of the warp have written to shared memory is seen by TMA.
OP void fence_proxy_async() {
#if ON_GPU
  fence_proxy_async_shared();
  __syncwarp();
#else
  host::self->show_stores();
#endif
}
// Waits until the stage at hand is full, or is empty, which it is at first.
template <typename T, int DEPTH, Lanes LANES> OP void consumer_wait(const Pipeline<T, DEPTH, LANES>& pipeline, CallSite at = call_site()) {
  wait_for<LANES>(pipeline.full(), pipeline.phase(), at);
  if constexpr (COPIED_PAGES) fence_proxy_async();            // without it products read what was there before lanes copied
}
template <typename T, int DEPTH, Lanes LANES> OP void producer_acquire(const Pipeline<T, DEPTH, LANES>& pipeline, CallSite at = call_site()) {
  wait_for<LANES>(pipeline.empty(), pipeline.phase() ^ 1, at);
}
// The calling warp has read the stage at hand, and goes on to the next one. One lane arrives for all: what lanes have read one by one has to
// have been an operand of a product since, which they start together.
template <typename T, int DEPTH, Lanes LANES> OP void consumer_release(Pipeline<T, DEPTH, LANES>& pipeline, CallSite at = call_site()) {
  arrive_at<LANES>(pipeline.empty(), at);
  pipeline.advance();
}
// the same for tiles that the warp does not need
template <typename T, int DEPTH, Lanes LANES> OP void skip(Pipeline<T, DEPTH, LANES>& pipeline, int tiles, CallSite at = call_site()) {
  #pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    consumer_wait(pipeline, at);
    consumer_release(pipeline, at);
  }
}
// map[batch, head, row : row + rows of a tile] is on its way to the stage at hand, zero beyond the array
template <typename T, int DEPTH, Lanes LANES>
OP void start_load(const Pipeline<T, DEPTH, LANES>& pipeline, const TensorMap& map, const int (&batch)[BATCH_AXES], int head, int row, CallSite at) {
#if ON_GPU
  if (LANES == ELECT_ONE ? elect_sync() : lane_id() == 0) {
    #pragma unroll
    for (int i = 0; i < T::panels; ++i)
      cp_async_bulk_tensor_5d(pipeline.tile().base + i * T::panel_bytes, map, pipeline.full().address, 64 * i, row, head, batch[BATCH_AXES - 1], batch[BATCH_AXES - 2]);
  }
#else
  for (int i = 0; i < T::panels; ++i) {
    const Box box(map, pipeline.tile().base + i * T::panel_bytes, T::rows, 64 * i, row, head, batch, at);
    host::load_async(warp_id(), pipeline.full().address, T::panel_bytes, [=] { box.load(); }, at);
  }
#endif
}
// The same of columns from col0 on, into a tile that has its place in that stage.
template <typename T, int DEPTH, Lanes LANES, int ROWS, int WIDTH, typename OfTile>
OP void start_load(const Pipeline<T, DEPTH, LANES>& pipeline, const PanelTile<ROWS, WIDTH, OfTile>& to, const TensorMap& map, const int (&batch)[BATCH_AXES],
                   int head, int row, int col0, CallSite at) {
#if ON_GPU
  if (LANES == ELECT_ONE ? elect_sync() : lane_id() == 0) {
    #pragma unroll
    for (int i = 0; i < to.panels; ++i)
      cp_async_bulk_tensor_5d(to.base + i * to.panel_bytes, map, pipeline.full().address, col0 + to.panel_cols * i, row, head, batch[BATCH_AXES - 1],
                              batch[BATCH_AXES - 2]);
  }
#else
  for (int i = 0; i < to.panels; ++i) {
    const Box box(map, to.base + i * to.panel_bytes, ROWS, col0 + to.panel_cols * i, row, head, batch, at, to.panel_cols);
    host::load_async(warp_id(), pipeline.full().address, to.panel_bytes, [=] { box.load(); }, at);
  }
#endif
}
// One number for each row of the tile is on its way to `to`: from[0 : rows of a tile].
template <typename T, int DEPTH, Lanes LANES>
OP void start_numbers(const Pipeline<T, DEPTH, LANES>& pipeline, const float* from, SharedAddress to, CallSite at) {
  constexpr int bytes = T::rows * int(sizeof(float));
#if ON_GPU
  if (lane_id() == 0) cp_async_bulk(to, from, bytes, pipeline.full().address);
#else
  host::load_async(warp_id(), pipeline.full().address, bytes, [=] {
    count_read(bytes);
    std::memcpy(to, from, bytes);
  }, at);
#endif
}
// A piece of a tile, from its row `to` on, which has as many rows as a box of the map: map[element, head, row : row + rows] is on its way there.
template <typename T, int DEPTH, Lanes LANES>
OP void start_piece(const Pipeline<T, DEPTH, LANES>& pipeline, int to, int rows, const TensorMap& map, int element, int head, int row, CallSite at) {
  const SharedAddress base = pipeline.tile().base + to * 128;
#if ON_GPU
  if (LANES == ELECT_ONE ? elect_sync() : lane_id() == 0) {
    #pragma unroll (min_of(T::panels, 2))                     // of four, addresses would spill
    for (int i = 0; i < T::panels; ++i) cp_async_bulk_tensor_5d(base + i * T::panel_bytes, map, pipeline.full().address, 64 * i, row, head, element, 0);
  }
#else
  for (int i = 0; i < T::panels; ++i) {
    const Box box(map, base + i * T::panel_bytes, rows, 64 * i, row, head, {0, 0, 0, element}, at);
    host::load_async(warp_id(), pipeline.full().address, rows * 128, [=] { box.load(); }, at);
  }
#endif
}
// The stage at hand = this part of the array; goes on to the next one.
template <typename T, int DEPTH, Lanes LANES>
OP void load_async(Pipeline<T, DEPTH, LANES>& pipeline, const TensorMap& map, const int (&batch)[BATCH_AXES], int head, int row, CallSite at = call_site()) {
  arrive_expect_tx(pipeline.full(), T::bytes, at);
  start_load(pipeline, map, batch, head, row, at);
  pipeline.advance();
}
// The same, and with the tile comes one number for each of its rows.
template <typename T, int DEPTH, Lanes LANES>
OP void load_async(Pipeline<T, DEPTH, LANES>& pipeline, const TensorMap& map, const int (&batch)[BATCH_AXES], int head, int row, const float* from,
                   SharedAddress to, CallSite at = call_site()) {
  arrive_expect_tx(pipeline.full(), T::bytes + T::rows * int(sizeof(float)), at);
  start_load(pipeline, map, batch, head, row, at);
  start_numbers(pipeline, from, to, at);
  pipeline.advance();
}
// map[batch, head, row : row + BOX, col0 :] = tile[row0 : row0 + BOX], clipped to the array
template <int BOX = 16, int ROWS, int WIDTH>
OP void store_async(const TensorMap& map, const int (&batch)[BATCH_AXES], int head, int row, const PanelTile<ROWS, WIDTH>& tile, int row0,
                    int col0 = 0, CallSite at = call_site()) {
#if ON_GPU
  if (lane_id() == 0) {
    #pragma unroll
    for (int i = 0; i < tile.panels; ++i)
      cp_async_bulk_tensor_5d_store(map, tile.base + i * tile.panel_bytes + row0 * 128, col0 + 64 * i, row, head, batch[BATCH_AXES - 1], batch[BATCH_AXES - 2]);
    cp_async_bulk_commit_group();
  }
  __syncwarp();                                               // for the assembler, which would have the lanes meet later, and more often
#else
  for (int i = 0; i < tile.panels; ++i) {
    const Box box(map, tile.base + i * tile.panel_bytes + row0 * 128, BOX, col0 + 64 * i, row, head, batch, at);
    box.check_shown("has TMA read");
    if (box.map.size[0] % 8) host::self->fail("has TMA store rows that end within 16 bytes, all of which it writes", at);
    host::self->store_async([=] { box.store(); });
  }
#endif
}
// to[0 : count] += from[0 : count] is on its way, by TMA, while others add there as well; or `first` =, which is before the others.
OP void add_async(float* to, SharedAddress from, int count, bool first = false, CallSite at = call_site()) {
#if ON_GPU
  if (lane_id() == 0) {
    if (first) cp_async_bulk_store(to, from, count * 4);
    else cp_reduce_async_bulk_add(to, from, count * 4);
    cp_async_bulk_commit_group();
  }
  __syncwarp();                                               // for the assembler, which would have the lanes meet later, and more often
#else
  host::self->check_shown(from, count * 4, "has TMA add", at);
  host::self->add_async(to, from, count, first);
#endif
}
// to[begin : end] = from[0 : COUNT] over and over, multiples of COUNT, by TMA; it is in device memory then.
template <u32 COUNT> OP void store_repeated(float* to, u32 begin, u32 end, SharedAddress from, CallSite at = call_site()) {
#if ON_GPU
  #pragma unroll 1
  for (u32 i = begin + lane_id() * COUNT; i < end; i += 32 * COUNT) cp_async_bulk_store(to + i, from, COUNT * 4);
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group();                                 // of each lane, which has started some of them
  __syncwarp();
#else
  host::self->check_shown(from, COUNT * 4, "has TMA read", at);
  for (u32 i = begin; i < end; i += COUNT) count_written(COUNT * 4), host::self->store_async([=] { std::memcpy(to + i, from, COUNT * 4); });
  host::self->wait_for_async_stores();
#endif
}
// Waits until what this warp has added with add_async is in device memory.
OP void wait_for_reductions() {
#if ON_GPU
  if (lane_id() == 0) cp_async_bulk_wait_group();
  __syncwarp();
#else
  host::self->wait_for_async_sums();
#endif
}
// Waits until TMA has read what this warp has stored with store_async, or added with add_async.
OP void wait_for_stores() {
#if ON_GPU
  cp_async_bulk_wait_group_read();                            // of the lane that has started them: the others have nothing to wait for
  __syncwarp();
#else
  host::self->wait_for_async_stores();
#endif
}

// What other blocks have written to device memory, and this warp has been told of, comes before what TMA does there for it.
OP void fence_proxy_async_global() {
#if ON_GPU
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

template <int REGISTERS> OP void warpgroup_reg_alloc() {
#if ON_GPU
  setmaxnreg_inc<REGISTERS>();
#else
  host::do_together(warp_id());
#endif
}
template <int REGISTERS> OP void warpgroup_reg_dealloc() {
#if ON_GPU
  setmaxnreg_dec<REGISTERS>();
#else
  host::do_together(warp_id());
#endif
}

// host_block.cpp -- what `tile/host_block.cuh` declares.
#include "tile/host_block.cuh"
#include <algorithm>

namespace host {

// Ends all blocks: one has failed, or somebody wants it.
void Grid::end(const std::string& why) {
  {
    Lock lock(mutex);
    if (failure.empty()) failure = why;
  }
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  for (const auto& block : in_progress) block->wake_all();
}
// A team rests. If it was the last to move, all others hold still, and what is read here of their blocks does not change.
void Grid::rest() {
  if (--moving > 0 || stopped()) return;
  Block* first = nullptr;
  for (const auto& block : in_progress)
    if (block->rests && (!first || block->index < first->index)) first = block.get();
  if (first) first->fail_by_deadlock();
}
void Grid::counted(const u32& counter) {
  for (const auto& block : in_progress) block->counted(counter);
}
void Grid::join(Block& block) {
  if (cluster_blocks == 1) return;
  Lock lock(mutex);
  Cluster& cluster = clusters[block.index / cluster_blocks];
  cluster.blocks.resize(cluster_blocks);
  cluster.blocks[block.index % cluster_blocks] = &block;
}
void Grid::part(Block& block) {
  if (cluster_blocks == 1) return;
  Lock lock(mutex);
  clusters[block.index / cluster_blocks].blocks[block.index % cluster_blocks] = nullptr;
}
Block* Grid::other_block(const Block& of, int rank) {
  Lock lock(mutex);
  return clusters[of.index / cluster_blocks].blocks[rank];
}
// Its place in the array that it belongs to, whose address is the nearest one: {byte of the parameters}[index].
std::string Grid::name_of(const u32* counter) const {
  const u64 address = reinterpret_cast<uintptr_t>(counter);
  size_t nearest = 0;
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i] <= address && (params[nearest] > address || params[i] > params[nearest])) nearest = i;
  return "{" + std::to_string(nearest * sizeof(u64)) + "}[" + std::to_string((address - params[nearest]) / sizeof(u32)) + "]";
}

Block::Block(Grid& grid, int warps, int shared_bytes, Schedule schedule)
    : grid(grid), warps(warps), shared_bytes(shared_bytes), schedule(schedule), awaited(warps), waits_for(warps) {
  arena.resize(shared_bytes + 1024);
  shared = arena.data() + (1024 - reinterpret_cast<uintptr_t>(arena.data()) % 1024) % 1024;
}
void Block::start(i64 block) {
  index = block;
  live = warps;
  arrived = stuck = 0;
  meetings = 0;
  std::fill_n(arrived_in_named, NAMES, 0);
  std::fill_n(said_in_named, NAMES, false);
  barriers.clear();
  together.assign(warps, 0);
  stored_by.assign(shared_bytes, 0);
  std::memset(shared, 0xff, shared_bytes);                  // every 16- and 32-bit pattern of ones is a NaN
  grid.join(*this);
}
template <typename What, typename Ready> void Block::wait_until(Lock& lock, int warp, What what, Ready ready) {
  if (ready()) return;
  waits_for[warp] = what;
  while (!ready()) {
    if (ends()) throw Stopped{};
    const u64 seen = version;
    if (++stuck == live) all_stuck(lock);
    while (version == seen && !ends()) wake.wait(lock.held);
  }
}
void Block::wait_for(int warp, const u32& counter, u32 value, bool or_beyond, CallSite at) {
  const Awaited until{&counter, value, or_beyond};
  while (!until.met()) {                                    // in the end without the lock, where the sanitizer sees the order
    Lock lock(mutex);
    awaited[warp] = until;
    wait_until(lock, warp, [=] { return named(until) + named(at); }, [&] { return until.met(); });
    awaited[warp] = {};
  }
}
void Block::counted(const u32& counter) {
  Lock lock(mutex);
  for (const Awaited& until : awaited) {
    if (until.counter != &counter || !until.met()) continue;
    state_changed();
    return;
  }
}
void Block::fail_by_deadlock() {
  Lock lock(mutex);
  report_deadlock();
}
void Block::wake_all() {
  Lock lock(mutex);
  wake.notify_all();
}
void Block::state_changed() {
  if (rests) ++grid.moving;
  rests = false;
  ++version;
  stuck = 0;
  wake.notify_all();
}
void Block::fail(int warp, const std::string& what) {
  Lock lock(mutex);
  fail_locked(warp, what);
}
void Block::fail(int warp, const std::string& what, CallSite at) { fail(warp, what + named(at)); }
void Block::sync(int warp, CallSite at) {
  Lock lock(mutex);
  const u64 mine = barrier_phase;
  block_orders[mine % 2].give();
  if (++arrived == warps) { arrived = 0; ++barrier_phase; state_changed(); }
  else wait_until(lock, warp, [=] { return "the block barrier" + named(at); }, [&] { return barrier_phase != mine; });
  block_orders[mine % 2].take();
}
void Block::sync_cluster(int warp, CallSite at) {
  sync(warp, at);                                           // barriers that it has started count from now on
  u64 mine;                                                 // changes when all have come, this warp among them
  std::vector<Block*> all;
  Cluster* cluster;
  {
    Lock lock(mutex);
    mine = meetings;
  }
  {
    Lock lock(grid.mutex);
    cluster = &grid.clusters[index / grid.cluster_blocks];
    cluster->orders[mine % 2].give();
    if (++cluster->arrived == grid.cluster_blocks * warps) {
      cluster->arrived = 0;
      all = cluster->blocks;
    }
  }
  for (Block* block : all) block->meet();
  Lock lock(mutex);
  wait_until(lock, warp, [=] { return "the barrier of its cluster" + named(at); }, [&] { return meetings != mine; });
  cluster->orders[mine % 2].take();
}
void Block::meet() {
  Lock lock(mutex);
  ++meetings;
  state_changed();
}
Block& Block::other_block(int warp, int rank, const char* what, CallSite at) {
  Block* const other = grid.other_block(*this, rank);
  if (!other) fail(warp, std::string(what) + " block " + std::to_string(rank) + " of its cluster, which has not begun or has ended,", at);
  return *other;
}
void Block::arrive_named(int name, int members) {
  Lock lock(mutex);
  count_in_named(name, members);
}
void Block::sync_named(int warp, int name, int members, const char* whom, CallSite at) {
  Lock lock(mutex);
  const u64 phase = count_in_named(name, members);
  wait_until(lock, warp, [=] { return whom + named(at); }, [&] { return arrived_in_named[name] / members > phase; });
  named_orders[name][phase % 2].take();
}
bool Block::any_named(int warp, int name, int members, bool says, const char* whom, CallSite at) {
  Lock lock(mutex);
  said_in_named[name] |= says;
  const u64 phase = count_in_named(name, members);
  wait_until(lock, warp, [=] { return whom + named(at); }, [&] { return arrived_in_named[name] / members > phase; });
  named_orders[name][phase % 2].take();
  return answers_in_named[name][phase % 2];
}
void Block::init_mbarrier(int warp, const char* address, int count, CallSite at) {
  Lock lock(mutex);
  const Barrier fresh{count, count, warp, barrier_phase};
  if (!barriers.try_emplace(address, fresh).second) fail_locked(warp, "starts " + named(address) + " again" + named(at));
}
void Block::arrive(int warp, const char* address, i64 bytes, CallSite at) {
  Lock lock(mutex);
  Barrier& barrier = barrier_at(warp, address, at);
  if (barrier.missing == 0) fail_locked(warp, "arrives at " + named(address) + ", where all have arrived and bytes are still to come" + named(at));
  barrier.orders[barrier.phases % 2].give();
  barrier.missing_bytes += bytes;
  --barrier.missing;
  complete_phase(barrier);
}
void Block::load_async(int warp, const char* address, i64 bytes, const Task<>& copy, CallSite at) {
  if (schedule == EAGER) copy.call(copy.function);
  Lock lock(mutex);
  Barrier& barrier = barrier_at(warp, address, at);
  if (schedule == EAGER) { arrive_bytes(barrier, bytes); return; }
  barrier.orders[barrier.phases % 2].give();                // what another block of the cluster has written
  barrier.loads.push_back({bytes, copy});
  state_changed();
}
void Block::wait_for_mbarrier(int warp, const char* address, u32 phase, CallSite at) {
  for (;;) {
    std::vector<Load> due;
    {
      Lock lock(mutex);
      Barrier& barrier = barrier_at(warp, address, at);
      const auto open = [&] { return barrier.phases % 2 != phase; };
      wait_until(lock, warp, [&] { return named(address) + named(at) + ": " + missing_at(barrier); },
                 [&] { return open() || !barrier.loads.empty(); });
      barrier.orders[phase].take();
      if (open()) {
        barrier.noticed[warp] = barrier.phases;
        return;
      }
      due.swap(barrier.loads);
    }
    for (const Load& load : due) {
      load.copy();
      Lock lock(mutex);
      arrive_bytes(barrier_at(warp, address, at), load.bytes);
    }
  }
}
void Block::leave(int warp) {
  Lock lock(mutex);
  waits_for[warp] = [] { return std::string("nothing: it has finished"); };
  awaited[warp] = {};
  if (ends()) wake.notify_all();                            // others may not know yet
  if (--live == 0) {
    check_end();
    grid.part(*this);
  }
  else if (stuck == live) all_stuck(lock);
}
void Block::hide(int warp, const char* to, int bytes) { std::memset(shown_at(warp, to, bytes), warp + 1, bytes); }
void Block::show(int warp, const char* from, const char* to) {
  Lock lock(mutex);
  for (const char* i = from; i < to; ++i)
    if (stored_by[i - shared] == warp + 1) stored_by[i - shared] = 0;
}
void Block::check_shown(int warp, const char* from, int bytes, const char* who, CallSite at) {
  const unsigned char* by = shown_at(warp, from, bytes);
  if (by[0] || std::memcmp(by, by + 1, bytes - 1))
    fail(warp, std::string(who) + " what lanes have stored, without fence_proxy_async in between,", at);
}
u64 Block::count_in_named(int name, int members) {
  members_of_named[name] = members;
  const u64 phase = arrived_in_named[name] / members;
  named_orders[name][phase % 2].give();
  if (++arrived_in_named[name] % members == 0) {
    answers_in_named[name][phase % 2] = said_in_named[name];
    said_in_named[name] = false;
    state_changed();
  }
  return phase;
}
unsigned char* Block::shown_at(int warp, const char* address, int bytes) {
  if (address < shared || address + bytes > shared + shared_bytes)
    fail(warp, "uses shared memory from byte " + std::to_string(address - shared) + " on, of " + std::to_string(shared_bytes));
  return &stored_by[address - shared];
}
Barrier& Block::barrier_at(int warp, const char* address, CallSite at) {
  const auto found = barriers.find(address);
  if (found == barriers.end() || (found->second.starter != warp && found->second.started_in == barrier_phase))
    fail_locked(warp, "uses " + named(address) + ", which nobody has started before the last sync_block," + named(at));
  return found->second;
}
void Block::arrive_bytes(Barrier& barrier, i64 bytes) {
  barrier.orders[barrier.phases % 2].give();
  barrier.missing_bytes -= bytes;
  complete_phase(barrier);
}
void Block::complete_phase(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.missing_bytes != 0) return;
  ++barrier.phases;
  for (const auto& [warp, noticed] : barrier.noticed)
    if (barrier.phases > noticed + 1 && failure.empty()) {
      failure = "a barrier in block " + std::to_string(index) + " opens a second time before warp " + std::to_string(warp) + " has noticed the first";
      wake.notify_all();
    }
  barrier.missing = barrier.count;
  state_changed();
}
void Block::all_stuck(Lock& lock) {
  if (ends()) return;
  const bool alone = grid.cluster_blocks == 1;                // others may arrive here
  if (alone && std::none_of(awaited.begin(), awaited.end(), [](const Awaited& until) { return until.counter; })) return report_deadlock();
  rests = true;
  lock.held.unlock();                                       // the grid may lock any block
  grid.rest();
  lock.held.lock();
}
void Block::check_end() {
  if (ends()) return;
  for (const auto& [address, barrier] : barriers)
    if (barrier.missing_bytes != 0) failure = "block " + std::to_string(index) + " ends, and " + named(address) + " lacks " + missing_at(barrier);
  for (int name = 0; name < NAMES; ++name)
    if (arrived_in_named[name] && arrived_in_named[name] % members_of_named[name])
      failure = "block " + std::to_string(index) + " ends, and in named barrier " + std::to_string(name) + " a warp has arrived for which none has waited";
  for (int w = 0; w < warps; ++w)
    if (together[w] != together[w / 4 * 4])
      failure = "warps " + std::to_string(w / 4 * 4) + " and " + std::to_string(w) + " of block " + std::to_string(index) +
                " have not done the same with their warpgroup";
}
std::string Block::named(const Awaited& until) const {
  return grid.name_of(until.counter) + ", which is " + std::to_string(until.count()) + ", to become " + std::to_string(until.value) +
         (until.or_beyond ? " or more" : "");
}
std::string Block::missing_at(const Barrier& barrier) {
  return std::to_string(barrier.missing) + " of " + std::to_string(barrier.count) + " warps and " + std::to_string(barrier.missing_bytes) + " bytes";
}
void Block::fail_locked(int warp, const std::string& what) {
  if (failure.empty()) failure = "warp " + std::to_string(warp) + " of block " + std::to_string(index) + " " + what;
  wake.notify_all();
  throw Stopped{};
}
void Block::report_deadlock() {
  if (ends()) return;
  failure = "deadlock in block " + std::to_string(index) + ":";
  for (int w = 0; w < warps; ++w) failure += "\n  warp " + std::to_string(w) + " waits for " + waits_for[w]();
  wake.notify_all();
}
bool Block::ends() const { return !failure.empty() || grid.stopped(); }
std::string Block::named(CallSite at) { return " at " + std::string(at.file) + ":" + std::to_string(at.line); }
std::string Block::named(const char* address) const { return "the barrier at byte " + std::to_string(address - shared) + " of shared memory"; }

}  // namespace host

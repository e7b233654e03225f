// host_block.cuh -- a block on the host: its shared memory, its barriers, and the reports of who uses them wrongly.
#pragma once
#include "tile/host_order.cuh"
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace host {

enum Schedule { EAGER, DEFERRED };
struct Stopped {};                         // unwinds a warp when its block has failed, or the grid shall end
struct CallSite { const char* file; int line; };

struct Load { i64 bytes; std::function<void()> copy; };         // by TMA

// A barrier that counts arrivals of warps and of bytes. Phases are numbered from 0; two orders, because the next ones may arrive
// before all have noticed.
struct Barrier {
  int count, missing;                                         // warps that open it; those that have not come yet
  int starter;                                                // the warp that started it, and
  u64 started_in;                                             // between which block barriers: from the next one on, others know it
  i64 missing_bytes = 0;
  u64 phases = 0;
  Order orders[2] = {};
  std::unordered_map<int, u64> noticed = {};                  // how many phases, by each warp that has waited
  std::vector<Load> loads = {};                               // deferred, and not made yet
};

// What a warp waits for a counter in device memory to become. Blocks count such counters up for each other.
struct Awaited {
  const u32* counter = nullptr;
  u32 value = 0;
  bool or_beyond = false;
  u32 count() const { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
  bool met() const { return or_beyond ? count() >= value : count() == value; }
};

struct Block;
// What blocks know of each other. Each team of threads executes one block at a time. A team rests while all warps of its block are stuck, some
// of them because of a counter, and when no block is left for it. When all teams rest, nobody will ever count: a deadlock, however long
// or short a time that took.
struct Grid {
  const i64 blocks;
  const std::vector<u64> params;                              // among them the addresses of arrays
  int& stop;                                                  // other than 0: all warps shall end
  std::vector<std::unique_ptr<Block>> in_progress = {};       // of each team
  std::atomic<i64> next{0};
  std::atomic<int> moving{0};                                 // teams that do not rest
  std::mutex mutex = {};
  std::string failure = {};                                   // the first one

  bool stopped() const { return __atomic_load_n(&stop, __ATOMIC_RELAXED); }
  void end(const std::string& why);
  void rest();
  void counted(const u32& counter);
  std::string name_of(const u32* counter) const;
};

// One thread block: its shared memory, and who waits for what.
struct Block {
  static constexpr int NAMES = 16;                            // of named barriers, as many as a GPU has
  Grid& grid;
  const int warps, shared_bytes;
  const Schedule schedule;
  char* shared = nullptr;
  i64 index = 0;

  Block(Grid& grid, int warps, int shared_bytes, Schedule schedule)
      : grid(grid), warps(warps), shared_bytes(shared_bytes), schedule(schedule), awaited(warps), waits_for(warps) {
    arena.resize(shared_bytes + 1024);
    shared = arena.data() + (1024 - reinterpret_cast<uintptr_t>(arena.data()) % 1024) % 1024;
  }

  void start(i64 block) {
    index = block;
    live = warps;
    arrived = stuck = 0;
    std::fill_n(arrived_in_named, NAMES, 0);
    std::fill_n(said_in_named, NAMES, false);
    barriers.clear();
    together.assign(warps, 0);
    stored_by.assign(shared_bytes, 0);
    std::memset(shared, 0xff, shared_bytes);                  // every 16- and 32-bit pattern of ones is a NaN
  }

  // Blocks the calling warp until `ready()`, which is evaluated under the lock. A warp that finds it false is stuck until some
  // other warp changes the state; when every live warp is stuck, none of this block can. `what` tells what it waits for.
  template <typename What, typename Ready> void wait_until(Lock& lock, int warp, What what, Ready ready) {
    if (ready()) return;
    waits_for[warp] = what;
    while (!ready()) {
      if (ends()) throw Stopped{};
      const u64 seen = version;
      if (++stuck == live) all_stuck(lock);
      while (version == seen && !ends()) wake.wait(lock.held);
    }
  }
  // Blocks until other blocks have counted up to `value`, or beyond. Blocks start in order, so one that waits for an earlier one is served.
  void wait_for(int warp, const u32& counter, u32 value, bool or_beyond, CallSite at) {
    const Awaited until{&counter, value, or_beyond};
    while (!until.met()) {                                    // in the end without the lock, where the sanitizer sees the order
      Lock lock(mutex);
      awaited[warp] = until;
      wait_until(lock, warp, [=] { return named(until) + named(at); }, [&] { return until.met(); });
      awaited[warp] = {};
    }
  }
  // Some block has counted this counter up.
  void counted(const u32& counter) {
    Lock lock(mutex);
    for (const Awaited& until : awaited) {
      if (until.counter != &counter || !until.met()) continue;
      if (rests) ++grid.moving;
      rests = false;
      state_changed();
      return;
    }
  }
  // Nobody in the grid can move, and this is its first block that is not done.
  void fail_by_deadlock() {
    Lock lock(mutex);
    report_deadlock();
  }
  void wake_all() {
    Lock lock(mutex);
    wake.notify_all();
  }
  void state_changed() { ++version; stuck = 0; wake.notify_all(); }

  // Ends the block with a reason.
  [[noreturn]] void fail(int warp, const std::string& what) {
    Lock lock(mutex);
    fail_locked(warp, what);
  }
  [[noreturn]] void fail(int warp, const std::string& what, CallSite at) { fail(warp, what + named(at)); }

  void sync(int warp, CallSite at) {
    Lock lock(mutex);
    const u64 mine = barrier_phase;
    block_orders[mine % 2].give();
    if (++arrived == warps) { arrived = 0; ++barrier_phase; state_changed(); }
    else wait_until(lock, warp, [=] { return "the block barrier" + named(at); }, [&] { return barrier_phase != mine; });
    block_orders[mine % 2].take();
  }

  // Named barriers: one opens when so many warps have come to it, of which only some wait.
  void arrive_named(int name, int members) {
    Lock lock(mutex);
    count_in_named(name, members);
  }
  void sync_named(int warp, int name, int members, const char* whom, CallSite at) {
    Lock lock(mutex);
    const u64 phase = count_in_named(name, members);
    wait_until(lock, warp, [=] { return whom + named(at); }, [&] { return arrived_in_named[name] / members > phase; });
    named_orders[name][phase % 2].take();
  }
  bool any_named(int warp, int name, int members, bool says, const char* whom, CallSite at) {
    Lock lock(mutex);
    said_in_named[name] |= says;
    const u64 phase = count_in_named(name, members);
    wait_until(lock, warp, [=] { return whom + named(at); }, [&] { return arrived_in_named[name] / members > phase; });
    named_orders[name][phase % 2].take();
    return answers_in_named[name][phase % 2];
  }

  // Barriers that count arrivals.
  void init_mbarrier(int warp, const char* address, int count, CallSite at) {
    Lock lock(mutex);
    const Barrier fresh{count, count, warp, barrier_phase};
    if (!barriers.try_emplace(address, fresh).second) fail_locked(warp, "starts " + named(address) + " again" + named(at));
  }
  void arrive(int warp, const char* address, i64 bytes, CallSite at) {
    Lock lock(mutex);
    Barrier& barrier = barrier_at(warp, address, at);
    if (barrier.missing == 0) fail_locked(warp, "arrives at " + named(address) + ", where all have arrived and bytes are still to come" + named(at));
    barrier.orders[barrier.phases % 2].give();
    barrier.missing_bytes += bytes;
    --barrier.missing;
    complete_phase(barrier);
  }
  // TMA brings bytes that the barrier counts; deferred, when the first warp waits for them.
  void load_async(int warp, const char* address, const Load& load, CallSite at) {
    if (schedule == EAGER) load.copy();
    Lock lock(mutex);
    Barrier& barrier = barrier_at(warp, address, at);
    if (schedule == EAGER) { arrive_bytes(barrier, load.bytes); return; }
    barrier.loads.push_back(load);
    state_changed();
  }
  void wait_for_mbarrier(int warp, const char* address, u32 phase, CallSite at) {
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

  // What four warps have to do together, each so often as the others of its warpgroup.
  void do_together(int warp) { ++together[warp]; }

  void leave(int warp) {
    Lock lock(mutex);
    waits_for[warp] = [] { return std::string("nothing: it has finished"); };
    awaited[warp] = {};
    if (ends()) wake.notify_all();                            // others may not know yet
    if (--live == 0) check_end();
    else if (stuck == live) all_stuck(lock);
  }

  // What lanes store to shared memory TMA and products do not see until the warp shows it.
  void hide(int warp, const char* to, int bytes) { std::memset(shown_at(warp, to, bytes), warp + 1, bytes); }
  void show(int warp, const char* from, const char* to) {
    Lock lock(mutex);
    for (const char* i = from; i < to; ++i)
      if (stored_by[i - shared] == warp + 1) stored_by[i - shared] = 0;
  }
  void check_shown(int warp, const char* from, int bytes, const char* who, CallSite at) {
    const unsigned char* by = shown_at(warp, from, bytes);
    if (by[0] || std::memcmp(by, by + 1, bytes - 1))
      fail(warp, std::string(who) + " what lanes have stored, without fence_proxy_async in between,", at);
  }

  std::mutex mutex;
  std::string failure;
  bool rests = false;                                         // until a counter is counted up

 private:
  std::vector<char> arena;
  std::condition_variable wake;
  std::vector<Awaited> awaited;                               // by each warp
  std::vector<std::function<std::string()>> waits_for;
  int live = 0, arrived = 0, stuck = 0;
  u64 version = 0, barrier_phase = 0;
  Order block_orders[2];
  u64 arrived_in_named[NAMES];
  Order named_orders[NAMES][2];
  int members_of_named[NAMES];
  bool said_in_named[NAMES], answers_in_named[NAMES][2];      // by anyone before the next phase; before the last two
  std::unordered_map<const char*, Barrier> barriers;          // by their place in shared memory
  std::vector<u64> together;
  std::vector<unsigned char> stored_by;                                  // for each byte: the number of the warp that hides it, from 1

  u64 count_in_named(int name, int members) {
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
  unsigned char* shown_at(int warp, const char* address, int bytes) {
    if (address < shared || address + bytes > shared + shared_bytes)
      fail(warp, "uses shared memory from byte " + std::to_string(address - shared) + " on, of " + std::to_string(shared_bytes));
    return &stored_by[address - shared];
  }
  Barrier& barrier_at(int warp, const char* address, CallSite at) {
    const auto found = barriers.find(address);
    if (found == barriers.end() || (found->second.starter != warp && found->second.started_in == barrier_phase))
      fail_locked(warp, "uses " + named(address) + ", which nobody has started before the last sync_block," + named(at));
    return found->second;
  }
  void arrive_bytes(Barrier& barrier, i64 bytes) {
    barrier.orders[barrier.phases % 2].give();
    barrier.missing_bytes -= bytes;
    complete_phase(barrier);
  }
  // A warp that waits for a phase mistakes the phase after the next one for one that is still to come.
  void complete_phase(Barrier& barrier) {
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

  bool ends() const { return !failure.empty() || grid.stopped(); }
  void all_stuck(Lock& lock) {
    if (ends()) return;
    if (std::none_of(awaited.begin(), awaited.end(), [](const Awaited& until) { return until.counter; })) return report_deadlock();
    rests = true;
    lock.held.unlock();                                       // the grid may lock any block
    grid.rest();
    lock.held.lock();
  }

  // What only shows when all warps have left.
  void check_end() {
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

  static std::string named(CallSite at) { return " at " + std::string(at.file) + ":" + std::to_string(at.line); }
  std::string named(const char* address) const { return "the barrier at byte " + std::to_string(address - shared) + " of shared memory"; }
  std::string named(const Awaited& until) const {
    return grid.name_of(until.counter) + ", which is " + std::to_string(until.count()) + ", to become " + std::to_string(until.value) +
           (until.or_beyond ? " or more" : "");
  }
  static std::string missing_at(const Barrier& barrier) {
    return std::to_string(barrier.missing) + " of " + std::to_string(barrier.count) + " warps and " + std::to_string(barrier.missing_bytes) + " bytes";
  }
  [[noreturn]] void fail_locked(int warp, const std::string& what) {
    if (failure.empty()) failure = "warp " + std::to_string(warp) + " of block " + std::to_string(index) + " " + what;
    wake.notify_all();
    throw Stopped{};
  }
  void report_deadlock() {
    if (ends()) return;
    failure = "deadlock in block " + std::to_string(index) + ":";
    for (int w = 0; w < warps; ++w) failure += "\n  warp " + std::to_string(w) + " waits for " + waits_for[w]();
    wake.notify_all();
  }
};

// Ends all blocks: one has failed, or somebody wants it.
inline void Grid::end(const std::string& why) {
  {
    Lock lock(mutex);
    if (failure.empty()) failure = why;
  }
  __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
  for (const auto& block : in_progress) block->wake_all();
}
// A team rests. If it was the last to move, all others hold still, and what is read here of their blocks does not change.
inline void Grid::rest() {
  if (--moving > 0 || stopped()) return;
  Block* first = nullptr;
  for (const auto& block : in_progress)
    if (block->rests && (!first || block->index < first->index)) first = block.get();
  if (first) first->fail_by_deadlock();
}
inline void Grid::counted(const u32& counter) {
  for (const auto& block : in_progress) block->counted(counter);
}
// Its place in the array that it belongs to, whose address is the nearest one: {byte of the parameters}[index].
inline std::string Grid::name_of(const u32* counter) const {
  const u64 address = reinterpret_cast<uintptr_t>(counter);
  size_t nearest = 0;
  for (size_t i = 0; i < params.size(); ++i)
    if (params[i] <= address && (params[nearest] > address || params[i] > params[nearest])) nearest = i;
  return "{" + std::to_string(nearest * sizeof(u64)) + "}[" + std::to_string((address - params[nearest]) / sizeof(u32)) + "]";
}

}  // namespace host

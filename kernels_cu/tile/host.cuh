// host.cuh -- the other machine: blocks of a grid executed by OS threads, one thread a warp.
//
// What a GPU leaves undefined is made visible here. Shared memory starts as NaN. Asynchronous copies run in one of two schedules:
// EAGER, at the moment they are issued, and DEFERRED, at the last moment the waits allow; a kernel that lacks a wait passes one and
// fails the other. Values a lane stores to shared memory reach the other lanes, when deferred, at the next barrier. Under
// ThreadSanitizer a missing barrier between warps is a reported race. Warps that wait for each other in a circle end in a report.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace host {

enum Schedule { EAGER, DEFERRED };
struct Stopped {};                         // unwinds a warp when its block has failed

// One thread block: its shared memory, and who waits for what.
struct Block {
  const int warps, shared_bytes;
  const Schedule schedule;
  char* shared = nullptr;
  i64 index = 0;

  Block(int warps, int shared_bytes, Schedule schedule) : warps(warps), shared_bytes(shared_bytes), schedule(schedule), waits_for(warps) {
    arena.resize(shared_bytes + 1024);
    shared = arena.data() + (1024 - reinterpret_cast<uintptr_t>(arena.data()) % 1024) % 1024;
  }

  void start(i64 block) {
    index = block;
    live = warps;
    arrived = stuck = 0;
    arrived_in_pair.assign(warps, 0);
    std::memset(shared, 0xff, shared_bytes);                  // every 16- and 32-bit pattern of ones is a NaN
  }

  // Blocks the calling warp until `ready()`, which is evaluated under the lock. A warp that finds it false is stuck until some
  // other warp changes the state; when every live warp is stuck nobody can, and that is a deadlock.
  template <typename Ready> void wait_until(std::unique_lock<std::mutex>& lock, int warp, const std::string& what, Ready ready) {
    waits_for[warp] = what;
    while (!ready()) {
      const u64 seen = version;
      if (++stuck == live) report_deadlock();
      while (version == seen && failure.empty()) wake.wait(lock);
      if (!failure.empty()) throw Stopped{};
    }
    waits_for[warp].clear();
  }
  // Blocks until another block has counted up to `value`. Blocks start in order, so one that waits for an earlier one is served.
  void wait_for(const u32& counter, u32 value) {
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::atomic_ref<const u32>(counter).load(std::memory_order_acquire) != value) {
      if (std::chrono::steady_clock::now() > patience) {
        std::lock_guard<std::mutex> lock(mutex);
        failure = "deadlock in block " + std::to_string(index) + ": it waits for blocks that do not come before it";
        wake.notify_all();
        throw Stopped{};
      }
      std::this_thread::yield();
    }
  }
  void state_changed() { ++version; stuck = 0; wake.notify_all(); }

  void sync(int warp, const char* file, int line) {
    std::unique_lock<std::mutex> lock(mutex);
    const u64 mine = barrier_phase;
    if (++arrived == warps) { arrived = 0; ++barrier_phase; state_changed(); return; }
    wait_until(lock, warp, "the block barrier at " + std::string(file) + ":" + std::to_string(line), [&] { return barrier_phase != mine; });
  }
  // The number of warps that have come to a pair's barrier; every second one opens it.
  u64 arrive_pair(int pair) {
    const u64 mine = ++arrived_in_pair[pair];
    if (mine % 2 == 0) state_changed();
    return mine;
  }
  void sync_pair(int warp, int pair, const char* file, int line) {
    std::unique_lock<std::mutex> lock(mutex);
    const u64 mine = arrive_pair(pair), both = mine + mine % 2;
    wait_until(lock, warp, "the other warp of the pair at " + std::string(file) + ":" + std::to_string(line),
               [&] { return arrived_in_pair[pair] >= both; });
  }
  void leave(int warp) {
    std::unique_lock<std::mutex> lock(mutex);
    waits_for[warp] = "nothing: it has finished";
    if (--live > 0 && stuck == live) report_deadlock();
  }

  std::mutex mutex;
  std::string failure;

 private:
  std::vector<char> arena;
  std::condition_variable wake;
  std::vector<std::string> waits_for;
  int live = 0, arrived = 0, stuck = 0;
  u64 version = 0, barrier_phase = 0;
  std::vector<u64> arrived_in_pair;

  void report_deadlock() {
    failure = "deadlock in block " + std::to_string(index) + ":";
    for (int w = 0; w < warps; ++w) failure += "\n  warp " + std::to_string(w) + " waits for " + waits_for[w];
    wake.notify_all();
  }
};

// What a kernel moved to and from device memory, and computed in matrix products.
struct Counts {
  u64 read_bytes = 0, written_bytes = 0, flops = 0;
  void operator+=(const Counts& more) {
    read_bytes += more.read_bytes;
    written_bytes += more.written_bytes;
    flops += more.flops;
  }
};

struct Copy { void* dst; const void* src; int bytes; };         // src = null: zeros
struct Store { void* dst; int bytes; char value[16]; };

struct Warp {
  Block* block = nullptr;
  int warp = 0;
  Counts counts;

  void copy_async(void* dst, const void* src, int bytes) {
    if (src) counts.read_bytes += bytes;
    if (block->schedule == EAGER) perform({dst, src, bytes});
    else open.push_back({dst, src, bytes});
  }
  void commit_copies() { groups.push_back(std::move(open)); open.clear(); }
  void wait_for_copies(int pending) {
    while (int(groups.size()) > pending) {
      for (const Copy& copy : groups.front()) perform(copy);
      groups.erase(groups.begin());
    }
  }
  void store_shared(void* dst, const void* value, int bytes) {
    if (block->schedule == EAGER) { std::memcpy(dst, value, bytes); return; }
    Store store{dst, bytes, {}};
    std::memcpy(store.value, value, bytes);
    stores.push_back(store);
  }
  void publish_stores() {
    for (const Store& s : stores) std::memcpy(s.dst, s.value, s.bytes);
    stores.clear();
  }
  void start() { open.clear(); groups.clear(); stores.clear(); }

 private:
  std::vector<Copy> open;                                     // issued, not yet in a group
  std::vector<std::vector<Copy>> groups;                      // committed, oldest first
  std::vector<Store> stores;

  static void perform(const Copy& c) {
    if (c.src) std::memcpy(c.dst, c.src, c.bytes);
    else std::memset(c.dst, 0, c.bytes);
  }
};

inline thread_local Warp* self = nullptr;

inline void sync_block(const char* file, int line) {
  self->publish_stores();
  self->block->sync(self->warp, file, line);
}

inline void arrive_pair(int pair) {
  self->publish_stores();
  std::lock_guard<std::mutex> lock(self->block->mutex);
  self->block->arrive_pair(pair);
}
inline void sync_pair(int pair, const char* file, int line) {
  self->publish_stores();
  self->block->sync_pair(self->warp, pair, file, line);
}

// All warps of a team meet between two blocks of the grid.
struct Meeting {
  explicit Meeting(int members) : members(members) {}
  template <typename Last> void wait(Last last) {
    std::unique_lock<std::mutex> lock(mutex);
    const u64 mine = round;
    if (++here == members) { here = 0; last(); ++round; wake.notify_all(); return; }
    while (round == mine) wake.wait(lock);
  }
 private:
  std::mutex mutex;
  std::condition_variable wake;
  const int members;
  int here = 0;
  u64 round = 0;
};

// Executes kernel(params) for every block of the grid. Teams of `warps` threads take blocks in order until none is left or one fails.
// Adds what they moved and computed to `counts`. Returns the first failure, or an empty string.
template <typename Params>
std::string run_grid(void (*kernel)(const Params), const Params& params, i64 blocks, int warps, int shared_bytes, Schedule schedule, int teams,
                     Counts& counts) {
  std::atomic<i64> next{0};
  std::mutex mutex;
  std::string failure;

  auto team = [&] {
    Block block(warps, shared_bytes, schedule);
    Meeting meeting(warps);
    i64 current = 0;
    auto member = [&](int id) {
      Warp warp;
      warp.block = &block;
      warp.warp = id;
      self = &warp;
      for (;;) {
        meeting.wait([&] {
          if (!block.failure.empty()) {
            std::lock_guard<std::mutex> lock(mutex);
            if (failure.empty()) failure = block.failure;
            next = blocks;
          }
          current = next++;
          if (current < blocks) block.start(current);
        });
        if (current >= blocks) {
          std::lock_guard<std::mutex> lock(mutex);
          counts += warp.counts;
          return;
        }
        warp.start();
        try { kernel(params); } catch (const Stopped&) {}
        block.leave(id);
      }
    };
    std::vector<std::thread> others;
    for (int id = 1; id < warps; ++id) others.emplace_back(member, id);
    member(0);
    for (std::thread& t : others) t.join();
  };

  std::vector<std::thread> more;
  for (int i = 1; i < teams; ++i) more.emplace_back(team);
  team();
  for (std::thread& t : more) t.join();
  return failure;
}

}  // namespace host

// host_block.cuh -- a block on the host: its shared memory, its barriers, and the reports of who uses them wrongly.
#pragma once
#include "tile/host_order.cuh"
#include "tile/scope.cuh"
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

// A task that is done later.
template <typename... With> class Kept {
  void (*call)(const void* function, With... with);
  std::vector<char> function;

 public:
  Kept(const Task<With...>& task)
      : call(task.call), function(static_cast<const char*>(task.function), static_cast<const char*>(task.function) + task.bytes) {}
  void operator()(With... with) const { call(function.data(), with...); }
};

struct Load { i64 bytes; Kept<> copy; };                      // by TMA

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
// Blocks that run at the same time. They do, because teams take blocks in order, and there are as many teams.
struct Cluster {
  std::vector<Block*> blocks;                                 // null: has not begun, or has ended
  int arrived = 0;                                            // warps, of all of them
  Order orders[2] = {};                                       // of every other time that they have met
};

// What blocks know of each other. Each team of threads executes one block at a time. A team rests while all warps of its block are stuck, some
// of them because of a counter, and when no block is left for it. When all teams rest, nobody will ever count: a deadlock, however long
// or short a time that took.
struct Grid {
  const i64 blocks;
  const std::vector<u64> params;                              // among them the addresses of arrays
  int& stop;                                                  // other than 0: all warps shall end
  const int cluster_blocks = 1;                               // neighbours that are a cluster
  std::vector<std::unique_ptr<Block>> in_progress = {};       // of each team
  std::atomic<i64> next{0};
  std::atomic<int> moving{0};                                 // teams that do not rest
  std::mutex mutex = {};
  std::string failure = {};                                   // the first one
  std::unordered_map<i64, Cluster> clusters = {};             // by their numbers

  // A block begins, or ends.
  void join(Block& block);
  void part(Block& block);
  // The block of its cluster with this rank, or null.
  Block* other_block(const Block& of, int rank);
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

  Block(Grid& grid, int warps, int shared_bytes, Schedule schedule);
  void start(i64 block);

  // Blocks the calling warp until `ready()`, which is evaluated under the lock. A warp that finds it false is stuck until some
  // other warp changes the state; when every live warp is stuck, none of this block can. `what` tells what it waits for.
  template <typename What, typename Ready> void wait_until(Lock& lock, int warp, What what, Ready ready);
  // Blocks until other blocks have counted up to `value`, or beyond. Blocks start in order, so one that waits for an earlier one is served.
  void wait_for(int warp, const u32& counter, u32 value, bool or_beyond, CallSite at);
  // Some block has counted this counter up.
  void counted(const u32& counter);
  // Nobody in the grid can move, and this is its first block that is not done.
  void fail_by_deadlock();
  void wake_all();
  void state_changed();

  // Ends the block with a reason.
  [[noreturn]] void fail(int warp, const std::string& what);
  [[noreturn]] void fail(int warp, const std::string& what, CallSite at);

  void sync(int warp, CallSite at);

  // Named barriers: one opens when so many warps have come to it, of which only some wait.
  void arrive_named(int name, int members);
  void sync_named(int warp, int name, int members, const char* whom, CallSite at);
  bool any_named(int warp, int name, int members, bool says, const char* whom, CallSite at);

  // All warps of the blocks of a cluster.
  void sync_cluster(int warp, CallSite at);
  void meet();
  // Another block of the cluster; `what` is what a warp does there.
  Block& other_block(int warp, int rank, const char* what, CallSite at);

  // Barriers that count arrivals.
  void init_mbarrier(int warp, const char* address, int count, CallSite at);
  void arrive(int warp, const char* address, i64 bytes, CallSite at);
  // TMA brings bytes that the barrier counts; deferred, when the first warp waits for them.
  void load_async(int warp, const char* address, i64 bytes, const Task<>& copy, CallSite at);
  void wait_for_mbarrier(int warp, const char* address, u32 phase, CallSite at);

  // What four warps have to do together, each so often as the others of its warpgroup.
  void do_together(int warp) { ++together[warp]; }

  void leave(int warp);

  // What lanes store to shared memory TMA and products do not see until the warp shows it.
  void hide(int warp, const char* to, int bytes);
  void show(int warp, const char* from, const char* to);
  void check_shown(int warp, const char* from, int bytes, const char* who, CallSite at);

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
  u64 meetings = 0;                                           // at the barrier of its cluster
  Order block_orders[2];
  u64 arrived_in_named[NAMES];
  Order named_orders[NAMES][2];
  int members_of_named[NAMES];
  bool said_in_named[NAMES], answers_in_named[NAMES][2];      // by anyone before the next phase; before the last two
  std::unordered_map<const char*, Barrier> barriers;          // by their place in shared memory
  std::vector<u64> together;
  std::vector<unsigned char> stored_by;                                  // for each byte: the number of the warp that hides it, from 1

  u64 count_in_named(int name, int members);
  unsigned char* shown_at(int warp, const char* address, int bytes);
  Barrier& barrier_at(int warp, const char* address, CallSite at);
  void arrive_bytes(Barrier& barrier, i64 bytes);
  // A warp that waits for a phase mistakes the phase after the next one for one that is still to come.
  void complete_phase(Barrier& barrier);

  bool ends() const;
  void all_stuck(Lock& lock);

  // What only shows when all warps have left.
  void check_end();

  static std::string named(CallSite at);
  std::string named(const char* address) const;
  std::string named(const Awaited& until) const;
  static std::string missing_at(const Barrier& barrier);
  [[noreturn]] void fail_locked(int warp, const std::string& what);
  void report_deadlock();
};

}  // namespace host

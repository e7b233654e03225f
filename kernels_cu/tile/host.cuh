// host.cuh -- the other machine: blocks of a grid executed by OS threads, one thread a warp.
//
// What a GPU leaves undefined is made visible here. Shared memory starts as NaN. Asynchronous copies run in one of two schedules:
// EAGER, at the moment they are issued, and DEFERRED, at the last moment the waits allow; a kernel that lacks a wait passes one and
// fails the other. Products of warpgroups read their operands in the same two ways. Values a lane stores to shared memory reach the other
// lanes, when deferred, at the next barrier. Under ThreadSanitizer a missing barrier between warps is a reported race. A grid in which
// nobody can move any more, and barriers used against the rules, end in a report.
#pragma once
#include "tile/host_block.cuh"
#include <exception>

namespace host {

// What a kernel moved to and from device memory, and computed in matrix products.
struct Counts {
  u64 read_bytes = 0, written_bytes = 0, flops = 0;
  void operator+=(const Counts& more) {
    read_bytes += more.read_bytes;
    written_bytes += more.written_bytes;
    flops += more.flops;
  }
};

// x += y, which other threads change at the same time. (C++17 has no std::atomic_ref.)
inline void add_atomically(float& x, float y) {
  float seen, sum;
  __atomic_load(&x, &seen, __ATOMIC_RELAXED);
  do sum = seen + y;
  while (!__atomic_compare_exchange(&x, &seen, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

struct Copy { void* dst; const void* src; int bytes; };         // src = null: zeros
struct Store { void* dst; int bytes; char value[64]; };
struct Product { const void* result; std::shared_ptr<void> sum; std::function<void()> compute, deliver; };

struct Warp {
  Block* block = nullptr;
  int warp = 0;
  Counts counts;
  bool lane_by_lane = false;                                  // in a `for_lane`, in which
  u64 asked = 0;                                              // so many lanes have asked for what the warp does together,
  CallSite asked_at = {};                                     // the last one here

  // An instruction of a GPU that moves several bytes at once wants them at a multiple of as many. Asked in sanitized builds.
  void require_aligned(const void* address, int bytes, const char* what) {
#ifdef __SANITIZE_ADDRESS__
    if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0)
      block->fail(warp, std::string("hands ") + what + " an address that is no multiple of " + std::to_string(bytes));
#else
    (void)address, (void)bytes, (void)what;
#endif
  }
  void copy_async(void* dst, const void* src, int bytes);
  void commit_copies();
  void wait_for_copies(int pending);
  void store_shared(void* dst, const void* value, int bytes);
  void publish_stores();
  // What the lanes have stored is seen by TMA and by products.
  void show_stores();

  // TMA reads shared memory: at once, or when the warp waits for that.
  void store_async(const std::function<void()>& copy);
  void wait_for_async_stores();
  // It adds what is in shared memory when it reads that; the sums change at once, or when the warp waits for that.
  void add_async(float* to, const char* from, int count);
  void wait_for_async_sums();

  // A product computes at once or when it is waited for. The registers at `result` get it from the wait that names them: before that,
  // a compiler is free to read them too early.
  void start_product(const Product& product);
  void wait_for_products(int pending, const void* named, CallSite at);
  // What the registers at `result` will hold when all products started for them are waited for, or null.
  std::shared_ptr<void> sum_at(const void* result) const;

  // Blocks count counters in device memory up, and wait for those of others. Returns what it is then.
  template <int ORDER> u32 count_up(u32& counter) {
    const u32 count = __atomic_add_fetch(&counter, 1, ORDER);
    block->grid.counted(counter);
    return count;
  }
  void wait_for(const u32& counter, u32 value, bool or_beyond, CallSite at) { block->wait_for(warp, counter, value, or_beyond, at); }

  // Every kernel multiplies often, so this is where a warp that never waits learns that it shall end.
  void count_flops(int flops) {
    if (block->grid.stopped()) throw Stopped{};
    counts.flops += flops;
  }

  [[noreturn]] void fail(const std::string& what, CallSite at);
  void check_shown(const char* from, int bytes, const char* who, CallSite at);

  void start();
  void end();

 private:
  std::vector<Copy> open;                                     // issued, not yet in a group
  std::vector<std::vector<Copy>> groups;                      // committed, oldest first
  std::vector<Store> stores;
  const char *first_hidden, *last_hidden;                     // around what was stored and not shown
  std::vector<std::function<void()>> async_stores, async_sums;        // not waited for
  std::vector<Product> running, complete;                     // products, oldest first; complete ones have not been named by a wait

  void hide(const char* dst, int bytes);
  static void perform(const Copy& c);
};

inline thread_local Warp* self = nullptr;

// A lane asks for what the warp does together: a shuffle, a vote, a barrier.
inline void ask_warp(CallSite at) {
  if (!self->lane_by_lane) return;
  ++self->asked;
  self->asked_at = at;
}

// All lanes, one after another. A GPU waits for the lanes that do not ask, for ever; and what has a `for_lane` of its own is done together.
struct Lanes {
  explicit Lanes(CallSite at) {
    if (!self) return;                                        // no warp, but a test of this header
    if (self->lane_by_lane) self->fail("has a lane do what all lanes do together", at);
    self->lane_by_lane = true;
    self->asked = 0;
  }
  ~Lanes() noexcept(false) {
    if (!self) return;
    self->lane_by_lane = false;
    if (self->asked % 32 && !std::uncaught_exceptions())
      self->fail("has " + std::to_string(self->asked % 32) + " of 32 lanes ask for what all of them do together", self->asked_at);
  }
};

inline void sync_block(CallSite at) {
  ask_warp(at);
  self->publish_stores();
  self->block->sync(self->warp, at);
}

inline void arrive_named(int name, int members) {
  self->publish_stores();
  self->block->arrive_named(name, members);
}
inline void sync_named(int name, int members, const char* whom, CallSite at) {
  ask_warp(at);
  self->publish_stores();
  self->block->sync_named(self->warp, name, members, whom, at);
}

// The same, and tells each whether any of them says so.
inline bool any_named(int name, int members, bool says, const char* whom, CallSite at) {
  ask_warp(at);
  self->publish_stores();
  return self->block->any_named(self->warp, name, members, says, whom, at);
}

// Executes the kernel for every block of the grid. Teams of `warps` threads take blocks in order until none is left, one fails, or
// somebody sets `stop`. The words of its parameters name arrays in reports. Adds what they moved and computed to `counts`. Returns the
// first failure, or an empty string.
std::string run_grid(const std::function<void()>& kernel, std::vector<u64> params, i64 blocks, int warps, int shared_bytes, Schedule schedule,
                     int teams, Counts& counts, int& stop);

// What is known of a kernel file where it is compiled: warps of a block, the size of its parameters, and how it is called with them.
struct KernelFile {
  int warps, params_bytes;
  void (*call)(void (*entry)(), const void* params);
};
extern const KernelFile kernel_file;

}  // namespace host

// host.cuh -- the other machine: blocks of a grid executed by OS threads, one thread a warp.
//
// What a GPU leaves undefined is made visible here. Shared memory starts as NaN. Asynchronous copies run in one of two schedules:
// EAGER, at the moment they are issued, and DEFERRED, at the last moment the waits allow; a kernel that lacks a wait passes one and
// fails the other. A store where a copy of the same warp may still arrive is a reported fault. Products of warpgroups read their
// operands in the same two ways. Values a lane stores to shared memory reach the other lanes, when deferred, at the next barrier.
// Under ThreadSanitizer a missing barrier between warps is a reported race. A grid in which nobody can move any more, and barriers
// used against the rules, end in a report.
#pragma once

// A kernel is compiled with this header, and what is declared here is compiled once for all kernels. So nothing of the standard library is
// included: a compiler would make what is used of it again for each kernel, which took a third of its time.
namespace host {

struct Block;
struct Pending;
struct CallSite { const char* file; int line; };

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

// What is done now or later: a function object that is there for now, and what calls it. For later its bytes are copied.
template <typename... With> struct Task {
  void (*call)(const void* function, With... with);
  const void* function;
  int bytes;
  template <typename F> Task(const F& f)
      : call([](const void* f, With... with) { (*static_cast<const F*>(f))(with...); }), function(&f), bytes(sizeof f) {
    static_assert(__is_trivially_copyable(F) && alignof(F) <= 16, "its bytes are all of it, and may lie where new puts them");
  }
};

constexpr int LARGEST_STORE = 64;                             // bytes that a lane stores at once

struct Warp {
  Block* block = nullptr;
  int warp = 0;
  char* shared = nullptr;                                     // memory of its block
  u32 block_id = 0, blocks = 0;                               // the number of that, of so many
  const int* stop = nullptr;                                  // other than 0: the grid shall end
  Counts counts;
  bool lane_by_lane = false;                                  // in a `for_lane`, in which
  u64 asked = 0;                                              // so many lanes have asked for what the warp does together,
  CallSite asked_at = {};                                     // the last one here
  Pending* pending = nullptr;                                 // what it has started

  // An instruction of a GPU that moves several bytes at once wants them at a multiple of as many. Asked in sanitized builds.
  void require_aligned(const void* address, int bytes, const char* what) {
#ifdef __SANITIZE_ADDRESS__
    if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) fail_by_alignment(bytes, what);
#else
    (void)address, (void)bytes, (void)what;
#endif
  }
  void copy_async(void* dst, const void* src, int bytes);     // src = null: zeros
  void commit_copies();
  void wait_for_copies(int most);
  void store_shared(void* dst, const void* value, int bytes);
  void publish_stores();
  // What the lanes have stored is seen by TMA and by products.
  void show_stores();

  // TMA reads shared memory: at once, or when the warp waits for that.
  void store_async(const Task<>& copy);
  void wait_for_async_stores();
  // It adds what is in shared memory when it reads that, or stores it; the sums change at once, or when the warp waits for that.
  void add_async(float* to, const char* from, int count, bool first);
  void wait_for_async_sums();

  // A product computes at once or when it is waited for: `compute` changes a copy of the registers at `result`, which it takes over from
  // the product before if it adds to that. The registers get it from the wait that names them, and are NaN before that: a compiler is
  // free to read them too early.
  void start_product(void* result, int bytes, bool add, const Task<void*>& compute, CallSite at);
  void wait_for_products(int most, const void* named, CallSite at);

  // Blocks count counters in device memory up, and wait for those of others. Returns what it is then.
  template <int ORDER> u32 count_up(u32& counter) {
    const u32 count = __atomic_add_fetch(&counter, 1, ORDER);
    counted(counter);
    return count;
  }
  void wait_for(const u32& counter, u32 value, bool or_beyond, CallSite at);

  // Every kernel multiplies often, so this is where a warp that never waits learns that it shall end.
  void count_flops(int flops) {
    if (__atomic_load_n(stop, __ATOMIC_RELAXED)) end_early();
    counts.flops += flops;
  }

  [[noreturn]] void fail(const char* what, CallSite at);
  [[noreturn]] void fail_by_alignment(int bytes, const char* what);
  [[noreturn]] void fail_by_box(int rows, int cols, int box_rows, int box_cols, CallSite at);
  // Unless the warp ends because something else has failed.
  void fail_by_lanes();
  void check_shown(const char* from, int bytes, const char* who, CallSite at);

  void start();
  void end();

 private:
  void counted(const u32& counter);
  [[noreturn]] void end_early();
  void hide(const char* dst, int bytes);
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
    if (self->asked % 32) self->fail_by_lanes();
  }
};

// Barriers of the block.
void sync_block(CallSite at);
// Named ones: one opens when so many warps have come to it, of which only some wait.
void arrive_named(int name, int members);
void sync_named(int name, int members, const char* whom, CallSite at);
// The same, and tells each whether any of them says so.
bool any_named(int name, int members, bool says, const char* whom, CallSite at);

// Barriers that count arrivals, by their place in shared memory.
void init_mbarrier(int warp, const char* address, int count, CallSite at);
void arrive(int warp, const char* address, i64 bytes, CallSite at);
// TMA brings bytes that the barrier counts; deferred, when the first warp waits for them.
void load_async(int warp, const char* address, i64 bytes, const Task<>& copy, CallSite at);
void wait_for_mbarrier(int warp, const char* address, u32 phase, CallSite at);

// Blocks of a cluster, by the rank of another one and by places in the shared memory of this one. All their warps wait for each other; a warp arrives at
// a barrier there; TMA copies from here to there, where the barrier counts the bytes: at once, or deferred, when the first warp waits for them.
void sync_cluster(CallSite at);
void arrive_there(int rank, const char* address, CallSite at);
void send_async(int rank, char* to, const char* from, int bytes, const char* barrier, CallSite at);

// What four warps have to do together, each so often as the others of its warpgroup.
void do_together(int warp);

// What is known of a kernel file where it is compiled: warps of a block, the size of its parameters, and how it is called with them.
struct KernelFile {
  int warps, params_bytes;
  void (*call)(void (*entry)(), const void* params);
};
extern const KernelFile kernel_file;

}  // namespace host

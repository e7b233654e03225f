// host_run.cpp -- the entries that Python calls to execute a kernel on this machine's processor, compiled once for all kernels.
#include "host_machine.cpp"
#include <chrono>

typedef void Kernel();                     // whatever its parameters are

// A kernel that threads of its own execute, so that the caller can wait for it piece by piece, and give it up.
struct Run {
  std::vector<u64> params;
  host::Counts counts;
  int stop = 0;
  std::string failure;
  std::mutex mutex = {};
  std::condition_variable changed = {};
  bool has_ended = false;
  std::thread thread;
};

// Begins a run, which `ended` and `finish` are then called with.
extern "C" void launch(Run** run, Kernel* kernel, const void* params, i64 blocks, int cluster, int shared_bytes, int deferred, int teams) {
  Run* const started = *run = new Run;
  started->params.resize(host::kernel_file.params_bytes / sizeof(u64));
  std::memcpy(started->params.data(), params, started->params.size() * sizeof(u64));
  started->thread = std::thread([=] {
    const int warps = host::kernel_file.warps;
    const host::Schedule schedule = deferred ? host::DEFERRED : host::EAGER;
    const auto of_block = [=] { host::kernel_file.call(kernel, started->params.data()); };
    started->failure = host::run_grid(of_block, started->params, blocks, cluster, warps, shared_bytes, schedule, teams, started->counts, started->stop);
    std::lock_guard<std::mutex> lock(started->mutex);
    started->has_ended = true;
    started->changed.notify_all();
  });
}
// Waits for the end, but not longer. Returns whether it has come.
extern "C" int ended(Run* run, int milliseconds) {
  std::unique_lock<std::mutex> lock(run->mutex);
  return run->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [=] { return run->has_ended; });
}
// Stops a run that has not ended; from then on no memory of the caller is touched. Adds what the kernel moved and computed to counts: bytes
// read, bytes written, floating-point operations. Returns 0, or 1 with the reason in `message`.
extern "C" int finish(Run* run, u64* counts, char* message, int capacity) {
  __atomic_store_n(&run->stop, 1, __ATOMIC_RELAXED);
  if (run->thread.joinable()) run->thread.join();
  const std::string failure = run->failure;
  counts[0] += run->counts.read_bytes;
  counts[1] += run->counts.written_bytes;
  counts[2] += run->counts.flops;
  delete run;
  std::strncpy(message, failure.c_str(), capacity - 1);
  return !failure.empty();
}

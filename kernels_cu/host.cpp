// host.cpp -- a kernel file and the entry that Python calls to execute one of its kernels on this machine's processor.
#include KERNEL_FILE
#include <algorithm>

typedef void Kernel(const PARAMS);

// Adds what the kernel moved and computed to counts: bytes read, bytes written, floating-point operations.
// Returns 0, or 1 with the reason in `message`.
extern "C" int launch(Kernel* kernel, const void* params, i64 blocks, int shared_bytes, int deferred, int teams, u64* counts,
                      char* message, int capacity) {
  PARAMS copy;
  std::memcpy(&copy, params, sizeof copy);
  host::Counts total;
  const std::string failure = host::run_grid(kernel, copy, blocks, WARPS, shared_bytes, deferred ? host::DEFERRED : host::EAGER, teams, total);
  counts[0] += total.read_bytes;
  counts[1] += total.written_bytes;
  counts[2] += total.flops;
  std::strncpy(message, failure.c_str(), capacity - 1);
  return !failure.empty();
}

// host.cpp -- a kernel file and the entry that Python calls to execute it on this machine's processor.
#include KERNEL_FILE
#include <algorithm>

// Returns 0, or 1 with the reason in `message`.
extern "C" int launch(const void* params, i64 blocks, int deferred, int teams, char* message, int capacity) {
  decltype(host::params_of(KERNEL_NAME)) copy;
  std::memcpy(&copy, params, sizeof copy);
  const std::string failure = host::run_grid(KERNEL_NAME, copy, blocks, WARPS, SHARED_BYTES, deferred ? host::DEFERRED : host::EAGER, teams);
  std::strncpy(message, failure.c_str(), capacity - 1);
  return !failure.empty();
}

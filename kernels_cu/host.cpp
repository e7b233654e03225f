// host.cpp -- a kernel file, and what `host_run.cpp` asks of it: all that is compiled with each kernel.
#include KERNEL_FILE

static void call(void (*entry)(), const void* params) {
  PARAMS own;                                                 // aligned as it has to be
  std::memcpy(&own, params, sizeof own);
  reinterpret_cast<void (*)(const PARAMS)>(entry)(own);
}
const host::KernelFile host::kernel_file{WARPS, sizeof(PARAMS), call};

// host_order.cuh -- who comes before whom on the host, as ThreadSanitizer is told.
#pragma once
#include <mutex>

// ThreadSanitizer shall see the order that a kernel's barriers make, and no other: it is told of them one by one, and looks away while
// the machine does its own business under a lock, which orders whatever it happens to order.
#if defined(__SANITIZE_THREAD__)
#define TELL_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TELL_SANITIZER 1
#endif
#endif
#ifdef TELL_SANITIZER
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);    // and writes
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void __tsan_acquire(void* order);
void __tsan_release(void* order);
}
#endif

namespace host {

// An order between warps: what one did before it gave comes before what another does after it has taken.
struct Order {
#ifdef TELL_SANITIZER
  char place;
  void give() { AnnotateIgnoreSyncEnd("", 0); __tsan_release(&place); AnnotateIgnoreSyncBegin("", 0); }
  void take() { AnnotateIgnoreSyncEnd("", 0); __tsan_acquire(&place); AnnotateIgnoreSyncBegin("", 0); }
#else
  void give() {}
  void take() {}
#endif
};
// The lock of a block, under which orders are given and taken.
struct Lock {
#ifdef TELL_SANITIZER
  struct LookAway {
    LookAway() { AnnotateIgnoreSyncBegin("", 0); AnnotateIgnoreReadsBegin("", 0); }
    ~LookAway() { AnnotateIgnoreReadsEnd("", 0); AnnotateIgnoreSyncEnd("", 0); }
  } look_away;
#endif
  std::unique_lock<std::mutex> held;
  explicit Lock(std::mutex& mutex) : held(mutex) {}
};

}  // namespace host

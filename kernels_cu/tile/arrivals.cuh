// arrivals.cuh -- which of several blocks is the last to arrive: a counter in device memory that takes neither a launch nor a
// memset to begin with, and that a CUDA graph may use again and again.
//
// The counter has 64 bits: a mark, and behind it how many have arrived. The last block to arrive leaves a count of 0 for the next
// launch. Memory without the mark has not been a counter yet, or has been lent to something else meanwhile: a block that finds it
// so makes it a counter, at which it is the first to have arrived. No number that a kernel leaves in memory has the mark: as
// float32, its upper half is NaN with a payload. All blocks have to expect as many: where lengths change while a kernel runs, a
// count is left over, which the next launch takes for its own.
//
//     anything ---- the first to find no mark ----> 1 ---- each other ----> n ---- the last one of n ----> 0 ---- each ----> n
#pragma once
#include "tile/shared.cuh"

constexpr int ARRIVAL_BITS = 8;                               // of a count: there are at most 255 blocks
constexpr u64 ARRIVAL_MARK = 0xffe9b3d16a57c5ull;

#if ON_GPU
OP u64 atom_add_acq_rel(u64* to, u64 x) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(x) : "memory");
  return before;
}
OP u64 atom_cas_acq_rel(u64* to, u64 expected, u64 x) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(before) : "l"(to), "l"(expected), "l"(x) : "memory");
  return before;
}
#else
OP u64 atom_add_acq_rel(u64* to, u64 x) { return __atomic_fetch_add(to, x, __ATOMIC_ACQ_REL); }
OP u64 atom_cas_acq_rel(u64* to, u64 expected, u64 x) {
  __atomic_compare_exchange_n(to, &expected, x, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
#endif

OP bool has_mark(u64 counter) { return counter >> ARRIVAL_BITS == ARRIVAL_MARK; }
OP u32 arrivals_of(u64 counter) { return u32(counter) & ((1u << ARRIVAL_BITS) - 1); }

// One thread arrives for its block: how many have before. What they had written, and their blocks up to a barrier, it sees.
OP u32 arrive(u64* counter) {
  u64 found = atom_add_acq_rel(counter, 1);
  if (has_mark(found)) return arrivals_of(found);
  for (++found;;) {                                           // what was added is lost with what was there
    const u64 before = atom_cas_acq_rel(counter, found, ARRIVAL_MARK << ARRIVAL_BITS | 1);
    if (before == found) return 0;
    if (has_mark(before)) return arrivals_of(atom_add_acq_rel(counter, 1));
    found = before;                                           // somebody else has added to what was there, and can do so only once
  }
}

// The block arrives, by one warp, behind a barrier that all of it has come to: how many have before goes to shared memory.
OP void count_arrival(u64* counter, SharedAddress before) {
#if ON_GPU
  if (lane_id() == 0) store_shared(before, arrive(counter));
#else
  store_shared(before, arrive(counter));
#endif
}
// By one warp of the last block.
OP void clear_arrivals(u64* counter) {
  for_lane(l) if (l == 0) *counter = ARRIVAL_MARK << ARRIVAL_BITS;
}

// Work queues for parallel threads, and scratch memory that outlives a run. No templates of the standard library: the linker would
// merge them across translation units that are compiled for different processors.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>

#include "team.h"

namespace SP_NAMESPACE {

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The work items of one stage. Each thread takes the next item until none is left, then waits until all items are done. A thread
// that is descheduled between two items delays no other. Threads that wait read `done` over and over: it has a cache line of its own, so
// that a thread that takes an item does not have to fetch the line of `taken` from all of them.
struct alignas(64) WorkQueue {
  int64_t taken;
  int64_t found[2];  // numbers of work items of later stages, which an item of this one sets
  alignas(64) int64_t done;

  // The item that the next thread takes; there may be no such item.
  int64_t next() const { return __atomic_load_n(&taken, __ATOMIC_RELAXED); }

  template <typename Work>
  void run(int64_t count, Work work) {
    if (count <= 0) return;
    for (int64_t item; (item = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < count;) {
      work(item);
      __atomic_fetch_add(&done, 1, __ATOMIC_RELEASE);
    }
    for (int64_t spins = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < count; spins++) {
      if (spins % 1024 == 1023)
        sched_yield();
      else
        relax();
    }
  }
};

// Call work() in up to `threads` threads, this one included: see team.h.
template <typename Work>
static inline void run_together(int threads, Work work) {
  if (threads > 1)
    sp_run_together(threads, [](void *context) { (*(Work *)context)(); }, &work);
  else
    work();
}

// Run items of work in threads, as they become free.
template <typename Work>
static inline void share_out(int64_t count, int threads, Work work) {
  WorkQueue queue = {};
  run_together(threads, [&] { queue.run(count, work); });
}

// A growable array that keeps its memory when it shrinks.
template <typename T>
struct List {
  T *items = nullptr;
  int64_t size = 0, room = 0;
  ~List() { free((void *)items); }
  void resize(int64_t n) {
    if (n > room) {
      room = n > 2 * room ? n : 2 * room;
      T *moved = (T *)aligned_alloc(64, (room * sizeof(T) + 63) / 64 * 64);
      if (!moved) abort();
      if (items) __builtin_memcpy((void *)moved, (const void *)items, size * sizeof(T));
      free((void *)items);
      items = moved;
    }
    size = n;
  }
  // Like resize, but drops the items. The room is a power of two.
  void renew(int64_t n) {
    if (n > room) {
      free((void *)items);
      items = nullptr, size = 0;
      int64_t power = 1;
      while (power < n) power *= 2;
      room = 0, resize(power);
    }
    size = n;
  }
  void push(const T &item) {
    resize(size + 1);
    items[size - 1] = item;
  }
  T &operator[](int64_t i) { return items[i]; }
};

static inline void clear_stages(List<WorkQueue> &stages, int64_t count) {
  stages.resize(count);
  __builtin_memset((void *)stages.items, 0, count * sizeof(WorkQueue));
}

}  // namespace SP_NAMESPACE

// Threads that help a calling thread, compiled once for all instruction sets.
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>

namespace {

constexpr int64_t CLOSED = int64_t(1) << 62;
constexpr int64_t PATIENCE = 1000000;  // ns that a helper looks for work before it sleeps: longer than the Python of a step
constexpr int MOST_HELPERS = 255;
constexpr int LINES = 128;  // bytes of two cache lines
int forks = 0;  // of this process and its ancestors; a child has no threads of its parent

void relax(int64_t spins) {
  if (spins % 1024 == 1023) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// Idle helpers read `regions` and `ended` over and over. Nothing else is in their cache lines, of which processors fetch two at once.
struct Team {
  // The number of helpers inside a region, plus CLOSED while none may enter.
  alignas(LINES) int64_t gate = CLOSED;
  alignas(LINES) int64_t regions = 0;  // opened so far
  int64_t ended = 0;
  alignas(LINES) int64_t sleeping = 0;
  int64_t wanted = 0;  // helpers of this region
  void (*work)(void *) = nullptr;
  void *context = nullptr;
  int helpers = 0, made_after = forks;
  int64_t users = 1;  // the owner and the helpers: the last one deletes the team
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t more = PTHREAD_COND_INITIALIZER;

  bool enter() {
    int64_t inside = __atomic_load_n(&gate, __ATOMIC_RELAXED);
    while (inside < CLOSED)
      if (__atomic_compare_exchange_n(&gate, &inside, inside + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return true;
    return false;
  }

  bool is_idle(int64_t seen) { return __atomic_load_n(&regions, __ATOMIC_SEQ_CST) == seen && !__atomic_load_n(&ended, __ATOMIC_RELAXED); }

  // Return when a region after the first `seen` opens, or the team ends.
  void wait(int64_t seen) {
    const int64_t begun = now();
    for (int64_t spins = 0; is_idle(seen); spins++) {
      relax(spins);
      if (spins % 64 == 63 && now() - begun > PATIENCE) break;
    }
    if (!is_idle(seen)) return;
    pthread_mutex_lock(&lock);
    __atomic_fetch_add(&sleeping, 1, __ATOMIC_SEQ_CST);
    while (is_idle(seen)) pthread_cond_wait(&more, &lock);
    __atomic_fetch_sub(&sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
  }

  void wake() {
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&more);
    pthread_mutex_unlock(&lock);
  }

  void leave_for_good() {
    if (__atomic_sub_fetch(&users, 1, __ATOMIC_ACQ_REL) == 0) delete this;
  }

  void help(int64_t number) {
    for (int64_t seen = 0; wait(seen), !__atomic_load_n(&ended, __ATOMIC_ACQUIRE);) {
      seen = __atomic_load_n(&regions, __ATOMIC_ACQUIRE);
      if (number >= __atomic_load_n(&wanted, __ATOMIC_RELAXED) || !enter()) continue;
      work(context);
      __atomic_sub_fetch(&gate, 1, __ATOMIC_RELEASE);
    }
    leave_for_good();
  }

  void grow(int count);

  void run(int threads) {
    grow(threads - 1);
    __atomic_store_n(&wanted, threads - 1, __ATOMIC_RELAXED);
    __atomic_store_n(&gate, 0, __ATOMIC_RELEASE);
    __atomic_fetch_add(&regions, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleeping, __ATOMIC_SEQ_CST)) wake();
    work(context);
    __atomic_add_fetch(&gate, CLOSED, __ATOMIC_ACQ_REL);
    for (int64_t spins = 0; __atomic_load_n(&gate, __ATOMIC_ACQUIRE) != CLOSED; spins++) relax(spins);
  }
};

struct Helper {
  Team *team;
  int64_t number;
};

void *begin(void *given) {
  const Helper helper = *(Helper *)given;
  delete (Helper *)given;
  helper.team->help(helper.number);
  return nullptr;
}

// Start helpers until there are `count`. If the system refuses a thread, fewer helpers do all of the work.
void Team::grow(int count) {
  if (count > MOST_HELPERS) count = MOST_HELPERS;
  if (helpers >= count) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's other threads
  for (; helpers < count; helpers++) {
    pthread_t thread;
    Helper *helper = new Helper{this, helpers};
    __atomic_fetch_add(&users, 1, __ATOMIC_RELAXED);
    if (pthread_create(&thread, nullptr, begin, helper)) {
      __atomic_fetch_sub(&users, 1, __ATOMIC_RELAXED);
      delete helper;
      break;
    }
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

struct Owner {
  Team *team = nullptr;

  Team &get() {
    if (team && team->made_after != forks) team = nullptr;  // its memory may be in any state and is not freed
    if (!team) team = new Team;
    return *team;
  }

  ~Owner() {
    if (!team || team->made_after != forks) return;
    __atomic_store_n(&team->ended, 1, __ATOMIC_SEQ_CST);
    team->wake();
    team->leave_for_good();
  }
};

[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forks++; });

}  // namespace

void sp_run_together(int threads, void (*work)(void *), void *context) {
  static thread_local Owner owner;
  Team &team = owner.get();
  team.work = work, team.context = context;
  team.run(threads);
}

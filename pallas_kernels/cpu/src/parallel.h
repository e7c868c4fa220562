// A parallel loop on a borrowed thread pool, in which the calling thread works too.
//
// Waking a sleeping thread takes tens of microseconds, as long as many a loop of a decode step, and a step has a hundred
// loops. So a helper, when its loop is done, looks out for the next one for a moment before it returns to its pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jpaged {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A loop under way. Owned by all who work on it: a helper that comes after the end finds nothing to take.
//
// Each thread begins with a share of its own, neighbouring tasks from first to last, so that it reads memory in order and
// knows what it reads next; when that is done it takes from the ends of the others' shares.
class Loop {
 public:
  using Body = void (*)(const void* closure, int64_t task, int64_t next);
  static constexpr int64_t kMostShares = 64;

  Loop(int64_t tasks, int64_t threads, Body body, const void* closure)
      : tasks_(tasks), shares_(std::min({threads, tasks, kMostShares})), body_(body), closure_(closure) {
    for (int64_t i = 0; i < shares_; ++i) {
      share_[i].range.store(pack(tasks * i / shares_, tasks * (i + 1) / shares_), std::memory_order_relaxed);
    }
  }

  // Takes tasks until there are none.
  void work() {
    const int64_t mine = joined_.fetch_add(1, std::memory_order_relaxed);
    int64_t finished = 0, task, next;
    if (mine < shares_) {
      while (take_first(share_[mine].range, &task, &next)) {
        body_(closure_, task, next);
        ++finished;
      }
    }
    for (int64_t i = 1; i <= shares_; ++i) {
      std::atomic<uint64_t>& other = share_[(mine + i) % shares_].range;
      while (take_last(other, &task)) {
        body_(closure_, task, -1);
        ++finished;
      }
    }
    if (finished) done_.fetch_add(finished, std::memory_order_release);
  }

  // Until every task that somebody took is done.
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < tasks_; ++spins) {
      spins < 4000 ? relax() : std::this_thread::yield();
    }
  }

 private:
  // A range of tasks [begin, end) in one word.
  static uint64_t pack(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  static bool take_first(std::atomic<uint64_t>& range, int64_t* task, int64_t* next) {
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = now >> 32, end = now & 0xffffffff;
      if (begin >= end) return false;
      if (range.compare_exchange_weak(now, pack(begin + 1, end), std::memory_order_relaxed)) {
        *task = int64_t(begin);
        *next = begin + 1 < end ? int64_t(begin + 1) : -1;
        return true;
      }
    }
  }

  static bool take_last(std::atomic<uint64_t>& range, int64_t* task) {
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = now >> 32, end = now & 0xffffffff;
      if (begin >= end) return false;
      if (range.compare_exchange_weak(now, pack(begin, end - 1), std::memory_order_relaxed)) {
        *task = int64_t(end - 1);
        return true;
      }
    }
  }

  struct alignas(64) Share {
    std::atomic<uint64_t> range{0};
  };

  const int64_t tasks_;  // fewer than 2^32
  const int64_t shares_;
  const Body body_;
  const void* const closure_;  // on the stack of the caller, which stays as long as a task is left
  Share share_[kMostShares];
  alignas(64) std::atomic<int64_t> joined_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// The helpers that are looking out for a loop, whichever pool lent them.
class Lookout {
 public:
  // Shows a loop to those who look out. Returns how many they are.
  int64_t show(const std::shared_ptr<Loop>& loop) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (watchers_) {
      loop_ = loop;
      shown_.fetch_add(1, std::memory_order_release);
    }
    return watchers_;
  }

  // A helper's life: the loop it was called for, then whatever is shown while it looks out.
  void help(std::shared_ptr<Loop> loop) {
    uint64_t seen = enter();
    while (loop) {
      loop->work();
      loop.reset();
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(kMicroseconds);
      for (int spins = 0; shown_.load(std::memory_order_acquire) == seen; ++spins) {
        relax();
        if (spins % 16 == 15 && std::chrono::steady_clock::now() > until) break;
      }
      loop = take(&seen);
    }
  }

 private:
  static constexpr int kMicroseconds = 100;  // longer than what lies between two loops of one step

  uint64_t enter() {
    std::lock_guard<std::mutex> guard(mutex_);
    ++watchers_;
    return shown_.load(std::memory_order_relaxed);
  }

  // The loop shown since `seen`; or null, and the helper is no longer counted.
  std::shared_ptr<Loop> take(uint64_t* seen) {
    std::lock_guard<std::mutex> guard(mutex_);
    const uint64_t now = shown_.load(std::memory_order_relaxed);
    if (now == *seen) {
      if (--watchers_ == 0) loop_.reset();
      return nullptr;
    }
    *seen = now;
    return loop_;
  }

  std::mutex mutex_;
  int64_t watchers_ = 0;
  std::shared_ptr<Loop> loop_;
  std::atomic<uint64_t> shown_{0};
};

// Runs a closure of the borrowed pool: schedule(context, run, data) calls run(data) on some thread, soon or late.
struct Pool {
  void (*schedule)(void* context, void (*run)(void*), void* data) = nullptr;
  void* context = nullptr;
  int64_t threads = 1;  // of the pool, or 1 for no pool
  Lookout* lookout = nullptr;

  // body(i, next) for every i in [0, n), each once, on several threads. `next` is the task that this thread will most
  // likely take after i, or -1, so that its data can be fetched ahead. Never waits for a thread of the pool to become free: if none
  // does, the caller does all the work.
  template <class Body>
  void run(int64_t n, const Body& body) const {
    int64_t helpers = std::min(threads, n) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < n; ++i) body(i, i + 1 < n ? i + 1 : -1);
      return;
    }
    auto call = [](const void* closure, int64_t task, int64_t next) { (*static_cast<const Body*>(closure))(task, next); };
    auto loop = std::make_shared<Loop>(n, threads, call, &body);
    helpers -= lookout->show(loop);
    for (int64_t i = 0; i < helpers; ++i) schedule(context, &help, new Call{lookout, loop});
    loop->work();
    loop->wait();
  }

 private:
  struct Call {
    Lookout* lookout;
    std::shared_ptr<Loop> loop;
  };

  static void help(void* data) {
    std::unique_ptr<Call> call(static_cast<Call*>(data));
    call->lookout->help(std::move(call->loop));
  }
};

}  // namespace jpaged

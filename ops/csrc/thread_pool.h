// Threads of our own. Work is cut into parts and every thread takes the next free one, so the caller waits
// only for parts that were begun: a worker that the machine has put aside before it took one holds up
// nobody. Waits spin for a bounded time, as long as the gaps within a step last, and then sleep.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace bitsmith {

class ThreadPool {
 public:
  using Work = void (*)(const void* context, int64_t part);

  // Never destroyed: workers may outlive static destructors. A forked child starts with a pool of its own.
  static ThreadPool& instance() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { slot().store(new ThreadPool); });
    (void)registered;
    return *slot().load(std::memory_order_acquire);
  }

  // Does all parts on up to `num_threads` threads, the caller's among them.
  void run(int64_t num_threads, uint32_t num_parts, Work work, const void* context) {
    if (num_parts <= 1 || num_threads <= 1 || is_busy_.exchange(true, std::memory_order_acquire)) {
      for (uint32_t part = 0; part < num_parts; ++part) work(context, part);
      return;
    }
    while (num_workers_ < num_threads - 1) std::thread([this, i = num_workers_++] { serve(i); }).detach();
    num_active_.store(num_threads - 1, std::memory_order_relaxed);
    work_ = work;
    context_ = context;
    num_parts_ = num_parts;
    num_unfinished_.store(num_parts, std::memory_order_relaxed);
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    ticket_.store(uint64_t{job} << 32 | num_parts, std::memory_order_release);
    job_.store(job, std::memory_order_seq_cst);
    job_.notify_all();
    take_parts(job);
    wait_while(num_unfinished_, [](uint32_t unfinished) { return unfinished != 0; });
    is_busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr std::chrono::microseconds kSpin{60};

  static std::atomic<ThreadPool*>& slot() {
    static std::atomic<ThreadPool*> pool{new ThreadPool};
    return pool;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Returns the first value for which `is_waiting` is false.
  template <class F>
  static uint32_t wait_while(const std::atomic<uint32_t>& word, const F& is_waiting) {
    uint32_t value = word.load(std::memory_order_acquire);
    if (!is_waiting(value)) return value;
    const auto limit = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) {
        pause();
        value = word.load(std::memory_order_acquire);
        if (!is_waiting(value)) return value;
      }
    } while (std::chrono::steady_clock::now() < limit);
    for (; is_waiting(value); value = word.load(std::memory_order_acquire)) word.wait(value);
    return value;
  }

  void serve(int64_t index) {
    uint32_t done = 0;
    while (true) {
      done = wait_while(job_, [done](uint32_t job) { return job == done; });
      if (index < num_active_.load(std::memory_order_relaxed)) take_parts(done);
    }
  }

  // The ticket holds the job's number beside the parts left, so that a late worker cannot take a part of a
  // job it was not called for; while a part is taken its job's description stays.
  void take_parts(uint32_t job) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == job && static_cast<uint32_t>(ticket) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      work_(context_, num_parts_ - static_cast<uint32_t>(ticket));
      if (num_unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) num_unfinished_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  std::atomic<bool> is_busy_{false};
  int64_t num_workers_ = 0;
  std::atomic<int64_t> num_active_{0};
  Work work_ = nullptr;
  const void* context_ = nullptr;
  uint32_t num_parts_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> num_unfinished_{0};
};

}  // namespace bitsmith

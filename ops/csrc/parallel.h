// Work on the operators' own threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "thread_pool.h"

namespace bitsmith {

constexpr int64_t kAnyPart = std::numeric_limits<int64_t>::max();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline std::atomic<int64_t> chosen_num_threads{0};  // 0: as many as torch

inline int64_t num_threads() {
  const int64_t chosen = chosen_num_threads.load(std::memory_order_relaxed);
  return chosen > 0 ? chosen : at::get_num_threads();
}

// Where the i-th part to be begun lies: threads that take turns each walk through a range of their own, which
// memory serves faster than parts that alternate between them.
inline int64_t part_at(int64_t i, int64_t num_parts, int64_t num_ranges) {
  const int64_t range = i % num_ranges, each = num_parts / num_ranges, larger = num_parts % num_ranges;
  return range * each + std::min(range, larger) + i / num_ranges;
}

// Runs f(begin, end) over parts of [0, count). `unit_bytes` is what one unit streams, or its arithmetic
// expressed so (two products like a byte); what one thread does in a few µs is not split.
template <class F>
void for_each(int64_t count, int64_t unit_bytes, int64_t largest_part, const F& f) {
  constexpr int64_t kWorthwhileBytes = 48 << 10, kPartsPerThread = 4;
  const int64_t threads = num_threads();
  if (threads == 1 || count == 1 || count * unit_bytes < kWorthwhileBytes) {
    if (count > 0) f(0, count);
    return;
  }
  struct Context {
    const F& f;
    int64_t count, part, num_parts, num_ranges;
  };
  const int64_t part = std::clamp<int64_t>(count / (kPartsPerThread * threads), 1, largest_part);
  const Context context{f, count, part, ceil_div(count, part), threads};
  const auto do_part = [](const void* data, int64_t index) {
    const auto& c = *static_cast<const Context*>(data);
    const int64_t begin = part_at(index, c.num_parts, c.num_ranges) * c.part;
    c.f(begin, std::min(begin + c.part, c.count));
  };
  ThreadPool::instance().run(threads, static_cast<uint32_t>(context.num_parts), do_part, &context);
}

}  // namespace bitsmith

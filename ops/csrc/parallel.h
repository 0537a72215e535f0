// Work on torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>

namespace bitsmith {

constexpr int64_t kAnyPart = std::numeric_limits<int64_t>::max();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs f(begin, end) over parts of [0, count) on torch's threads, each taking the next part that is free: a
// thread that the machine holds up delays only its own part. `unit_bytes` is what one unit streams, or its
// arithmetic expressed so (two products like a byte); what one thread does in a few µs is not split.
template <class F>
void for_each(int64_t count, int64_t unit_bytes, int64_t largest_part, const F& f) {
  constexpr int64_t kWorthwhileBytes = 48 << 10, kPartsPerThread = 4;
  const int64_t num_threads = at::get_num_threads();
  if (num_threads == 1 || count == 1 || count * unit_bytes < kWorthwhileBytes) {
    if (count > 0) f(0, count);
    return;
  }
  const int64_t part = std::clamp<int64_t>(count / (kPartsPerThread * num_threads), 1, largest_part);
  const int64_t num_workers = std::min(num_threads, ceil_div(count, part));
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_workers, 1, [&](int64_t, int64_t) {
    while (true) {
      const int64_t begin = next.fetch_add(part);
      if (begin >= count) return;
      f(begin, std::min(begin + part, count));
    }
  });
}

}  // namespace bitsmith

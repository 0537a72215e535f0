// The operators that measure a machine's ceilings, on the threads that the others use. They do a known
// amount of work; whoever calls them holds the clock.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

#include "ceilings.h"
#include "forms.h"
#include "parallel.h"

namespace bitsmith {

// Reads all bytes of `data` once; returns the sum of its 64-bit words, modulo 2^64.
inline int64_t ceiling_read(const at::Tensor& data) {
  const char* op = "bitsmith::ceiling_read";
  TORCH_CHECK_VALUE(data.scalar_type() == at::kByte && data.dim() == 1 && data.is_contiguous() &&
                        data.numel() % kStreamUnit == 0,
                    op, ": data must be contiguous uint8 [n], n a multiple of ", kStreamUnit, ", got ",
                    data.scalar_type(), " ", data.sizes());
  const uint8_t* bytes = data.const_data_ptr<uint8_t>();
  std::atomic<uint64_t> sum{0};
  for_each(data.numel() / kStreamUnit, kStreamUnit, kAnyPart, [&](int64_t begin, int64_t end) {
    sum.fetch_add(stream_read(bytes, begin * kStreamUnit, end * kStreamUnit), std::memory_order_relaxed);
  });
  return static_cast<int64_t>(sum.load());
}

// Each thread multiplies and adds a few times `num_steps` times; returns all operations that were done.
inline int64_t ceiling_arithmetic(int64_t num_steps, bool is_int8) {
  TORCH_CHECK_VALUE(num_steps >= 0, "bitsmith::ceiling_arithmetic: num_steps is ", num_steps);
  constexpr int64_t kUnitsPerThread = 4, kMuchWork = 1 << 20;
  std::atomic<int64_t> num_operations{0};
  for_each(kUnitsPerThread * num_threads(), kMuchWork, kAnyPart, [&](int64_t begin, int64_t end) {
    const auto work = is_int8 ? kernels().multiply_add_int8 : kernels().multiply_add_fp32;
    for (int64_t unit = begin; unit < end; ++unit)
      num_operations.fetch_add(work(num_steps), std::memory_order_relaxed);
  });
  return num_operations.load();
}

}  // namespace bitsmith

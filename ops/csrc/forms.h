// Which form of the kernels is in use: the fastest that the build has, unless a test selects another.
#pragma once

#include <atomic>

#include "kernels.h"

namespace bitsmith {

inline std::atomic<const Kernels*> active_kernels{nullptr};

inline const Kernels& kernels() {
  const Kernels* active = active_kernels.load(std::memory_order_relaxed);
  if (active == nullptr) {
    active = avx2_kernels() != nullptr ? avx2_kernels() : portable_kernels();
    active_kernels.store(active, std::memory_order_relaxed);
  }
  return *active;
}

}  // namespace bitsmith

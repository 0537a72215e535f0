// Which form of the kernels is in use: the fastest that the build has, unless a test selects another.
#pragma once

#include <array>
#include <atomic>

#include "kernels.h"

namespace bitsmith {

// Fastest first; null for a form that this build has not.
inline std::array<const Kernels*, 4> all_forms() {
  return {avx512_vnni_kernels(), avx_vnni_kernels(), avx2_kernels(), portable_kernels()};
}

inline std::atomic<const Kernels*> active_kernels{nullptr};

inline const Kernels& kernels() {
  const Kernels* active = active_kernels.load(std::memory_order_relaxed);
  if (active == nullptr) {
    for (const Kernels* form : all_forms())
      if (active == nullptr) active = form;
    active_kernels.store(active, std::memory_order_relaxed);
  }
  return *active;
}

}  // namespace bitsmith

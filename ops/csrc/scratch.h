// Vectors whose memory starts at a cache line, so that eight floats never straddle two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace bitsmith {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
};

template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

// At least `count` elements that this thread keeps for a purpose; what they hold is left from before.
template <class T, class Purpose>
T* scratch(int64_t count) {
  static thread_local LineVector<T> kept;
  if (kept.size() < static_cast<size_t>(count)) kept.resize(static_cast<size_t>(count));
  return kept.data();
}

}  // namespace bitsmith

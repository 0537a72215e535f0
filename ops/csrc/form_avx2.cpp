// The AVX2 form of every kernel.
#include "eight_lanes.h"

namespace bitsmith {

const Kernels* avx2_kernels() {
#ifdef BITSMITH_HAS_AVX2
  static const Kernels kernels = eight_lane_kernels<Avx2Vector8>("avx2");
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace bitsmith

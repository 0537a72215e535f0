// The plain C++ form of every kernel.
#include "eight_lanes.h"

namespace bitsmith {

const Kernels* portable_kernels() {
  static const Kernels kernels = eight_lane_kernels<PortableVector8>("portable");
  return &kernels;
}

}  // namespace bitsmith

// The form with AVX-VNNI: products of int8 activations by vpdpbusd, the rest as AVX2 does it.
#include "ceilings_vnni.h"
#include "eight_lanes.h"
#include "linear_quantized_vnni.h"
#include "rows16_avx_vnni.h"

namespace bitsmith {

const Kernels* avx_vnni_kernels() {
#ifdef BITSMITH_HAS_AVX_VNNI
  using R = AvxVnniRows16;
  static const Kernels kernels = [] {
    Kernels form = eight_lane_kernels<Avx2Vector8>("avx_vnni");
    form.widens_int8 = false;
    form.linear_quantized = linear_quantized_vnni<R>;
    form.multiply_add_int8 = multiply_add_int8_vnni<R>;
    return form;
  }();
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace bitsmith

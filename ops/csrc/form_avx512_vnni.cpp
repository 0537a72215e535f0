// The form with AVX-512: products of int8 activations by vpdpbusd, dense products in sixteen lanes, the rest
// as AVX2 does it.
#include "ceilings_vnni.h"
#include "eight_lanes.h"
#include "linear_dense_avx512.h"
#include "linear_quantized_vnni.h"
#include "rows16_avx512.h"

namespace bitsmith {

const Kernels* avx512_vnni_kernels() {
#ifdef BITSMITH_HAS_AVX512_VNNI
  using R = Avx512Rows16;
  static const Kernels kernels = [] {
    Kernels form = eight_lane_kernels<Avx2Vector8>("avx512_vnni");
    form.widens_int8 = false;
    form.linear_dense = linear_dense_avx512;
    form.linear_quantized = linear_quantized_vnni<R>;
    form.multiply_add_fp32 = multiply_add_fp32_avx512;
    form.multiply_add_int8 = multiply_add_int8_vnni<R>;
    return form;
  }();
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace bitsmith

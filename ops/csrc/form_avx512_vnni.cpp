// The form with AVX-512: products of int8 activations by vpdpbusd, dense products in sixteen lanes, the rest
// as AVX2 does it.
#include "activations.h"
#include "ceilings_vnni.h"
#include "gated_activation.h"
#include "kv_cache.h"
#include "linear_dense_avx512.h"
#include "linear_fp8.h"
#include "linear_quantized_vnni.h"
#include "paged_attention.h"
#include "rows16_avx512.h"

namespace bitsmith {

const Kernels* avx512_vnni_kernels() {
#ifdef BITSMITH_HAS_AVX512_VNNI
  using V = Avx2Vector8;
  using R = Avx512Rows16;
  static const Kernels kernels = {
      .name = "avx512_vnni",
      .widens_int8 = false,
      .arrange_dense = arrange_dense<V>,
      .linear_dense = linear_dense_avx512,
      .arrange_quantized = arrange_quantized<V>,
      .linear_quantized = linear_quantized_vnni<R>,
      .gated_activation = gated_activation<V>,
      .write_cache = write_cache,
      .attend = attend<V>,
      .attend_segment = attend_segment<V>,
      .merge_segments = merge_segments<V>,
      .arrange_fp8 = arrange_fp8<V>,
      .linear_fp8 = linear_fp8<V>,
      .multiply_add_fp32 = multiply_add_fp32_avx512,
      .multiply_add_int8 = multiply_add_int8_vnni<R>,
  };
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace bitsmith

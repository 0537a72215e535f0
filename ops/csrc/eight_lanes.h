// The table of kernels over one vector of eight lanes: portable C++'s and AVX2's whole, and what other forms
// start from, replacing the kernels for which they have instructions of their own.
#pragma once

#include "activations.h"
#include "ceilings.h"
#include "gated_activation.h"
#include "kv_cache.h"
#include "linear_dense.h"
#include "linear_fp8.h"
#include "linear_quantized.h"
#include "paged_attention.h"

namespace bitsmith {

template <class V>
constexpr Kernels eight_lane_kernels(const char* name) {
  return {
      .name = name,
      .widens_int8 = true,
      .arrange_dense = arrange_dense<V>,
      .linear_dense = linear_dense<V>,
      .arrange_quantized = arrange_quantized<V>,
      .linear_quantized = linear_quantized<V>,
      .gated_activation = gated_activation<V>,
      .write_cache = write_cache,
      .attend = attend<V>,
      .attend_segment = attend_segment<V>,
      .merge_segments = merge_segments<V>,
      .arrange_fp8 = arrange_fp8<V>,
      .linear_fp8 = linear_fp8<V>,
      .multiply_add_fp32 = multiply_add_fp32<V>,
      .multiply_add_int8 = multiply_add_int8<V>,
  };
}

}  // namespace bitsmith

// Activations as the quantized kernels want them: copied and rounded, or int8 with a scale for each token
// and group (scale = largest magnitude / 127; a group of zeros has scale 0).
#pragma once

#include <algorithm>

#include "kernels.h"
#include "rounding.h"

namespace bitsmith {

// Largest magnitude; NaN when a value is NaN or infinite, so that the results are too.
template <class V>
inline float largest_magnitude(const float* x, int64_t count) {
  V largest = V::set(0.0f), poison = V::set(0.0f);
  for (int64_t k = 0; k < count; k += 8) {
    const V value = V::load(x + k);
    largest = V::max(value.abs(), largest);
    poison = V::fma(value, V::set(0.0f), poison);
  }
  return max_lanes(largest) + sum_lanes(poison);
}

// A group of one token to int8, in the width and order that the kernel reads.
template <class V>
inline void quantize_group(const QuantizedLinear& p, const float* from, int64_t at, int64_t of_group) {
  const float largest = largest_magnitude<V>(from, p.group_size);
  const V factor = V::set(largest > 0.0f ? 127.0f / largest : 0.0f);
  V sum = V::set(0.0f);  // exact: whole numbers far below 2^24
  for (int64_t k = 0; k < p.group_size; k += 8) {
    const V rounded = (V::load(from + k) * factor).round();
    const V q = V::max(V::min(rounded, V::set(127.0f)), V::set(-127.0f));
    sum = sum + q;
    if (p.activations.x_int8 != nullptr) {
      q.store_int8(p.activations.x_int8 + at + k);
    } else {
      q.store_int16_swapped(p.activations.x_int16 + at + k);
    }
  }
  p.activations.scale[of_group] = largest / 127.0f;
  p.activations.sum[of_group] = static_cast<int32_t>(sum_lanes(sum));
}

template <class V>
void arrange_quantized(const QuantizedLinear& p, const float* source, int64_t stride, bool round_bf16,
                       int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* from = source + t * stride;
    if (p.is_int8) {
      for (int64_t g = 0; g < p.num_groups; ++g) {
        const int64_t k = g * p.group_size;
        quantize_group<V>(p, from + k, t * p.in_features + k, t * p.num_groups + g);
      }
      continue;
    }
    float* to = p.activations.x + t * p.in_features;
    if (round_bf16) {
      for (int64_t k = 0; k < p.in_features; ++k) to[k] = round_to_bf16(from[k]);
    } else {
      std::copy(from, from + p.in_features, to);
    }
  }
}

}  // namespace bitsmith

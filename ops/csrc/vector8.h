// Eight floats at a time, twice: in plain C++ and in AVX2. Kernels are templates over one of these two,
// so both forms do the same operations in the same order and agree bit for bit.
//
// Knows nothing of tensors, layouts or threads.
#pragma once

#include "vector8_avx2.h"
#include "vector8_portable.h"

namespace bitsmith {

// Coefficients of exp(r) on |r| <= ln(2) / 2 (Taylor, relative error below 2e-7 there), and the range in
// which the result is neither subnormal nor infinite.
constexpr float kExpCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693145751953125f;
constexpr float kLn2Low = 1.42860682030941723e-6f;
constexpr float kExpLowest = -87.0f;
constexpr float kExpHighest = 88.0f;

// exp(x) to about 2e-7 relative; exactly 0 below kExpLowest, so a masked score of -infinity adds nothing.
template <class V>
inline V exp(V x) {
  const V clamped = V::min(V::max(x, V::set(kExpLowest)), V::set(kExpHighest));
  const V n = (clamped * V::set(kLog2E)).round();
  const V r = V::fma(n, V::set(-kLn2Low), V::fma(n, V::set(-kLn2High), clamped));
  V sum = V::set(kExpCoefficients[0]);
  for (int i = 1; i < 7; ++i) sum = V::fma(sum, r, V::set(kExpCoefficients[i]));
  return (sum * n.power_of_two()).zero_below(x, kExpLowest);
}

// tanh(x) to about 1e-7 absolute.
template <class V>
inline V tanh(V x) {
  const V t = exp<V>(x.abs() * V::set(-2.0f));
  return ((V::set(1.0f) - t) / (V::set(1.0f) + t)).with_sign_of(x);
}

// Sum of the lanes, in the order of `store_sums`.
template <class V>
inline float sum_lanes(const V& v) {
  PortableVector8 lanes;
  v.store(lanes.lane);
  return lanes.sum();
}

template <class V>
inline float max_lanes(const V& v) {
  float l[8];
  v.store(l);
  float m = l[0];
  for (int i = 1; i < 8; ++i) m = l[i] > m ? l[i] : m;
  return m;
}

}  // namespace bitsmith

// The gate of an MLP: silu or gelu (tanh form) of one half of a row, times the other half.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

// x / (1 + exp(-x))
template <class V>
inline V silu(V x) {
  return x / (V::set(1.0f) + exp<V>(x * V::set(-1.0f)));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
template <class V>
inline V gelu_tanh(V x) {
  const V inner = V::fma(x * x * x, V::set(0.044715f), x) * V::set(0.797884560802865356f);
  return x * V::set(0.5f) * (V::set(1.0f) + tanh<V>(inner));
}

template <class V, bool is_gelu>
inline V gated(V gate, V up) {
  return (is_gelu ? gelu_tanh<V>(gate) : silu<V>(gate)) * up;
}

template <class V, bool is_gelu>
inline void gate_row(const float* gate, const float* up, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) gated<V, is_gelu>(V::load(gate + i), V::load(up + i)).store(to + i);
  if (i == size) return;
  float tail[3][8] = {};
  std::copy(gate + i, gate + size, tail[0]);
  std::copy(up + i, up + size, tail[1]);
  gated<V, is_gelu>(V::load(tail[0]), V::load(tail[1])).store(tail[2]);
  std::copy(tail[2], tail[2] + size - i, to + i);
}

template <class V>
void gated_activation(const GatedActivation& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* gate = p.gate_up + t * p.stride;
    const auto row = p.is_gelu ? gate_row<V, true> : gate_row<V, false>;
    row(gate, gate + p.size, p.size, p.y + t * p.size);
  }
}

}  // namespace bitsmith

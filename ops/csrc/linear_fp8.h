// Products with e4m3 weights, row-major, rows padded with zeros to whole vectors. A product of two e4m3
// values is exact in fp32; sums are fp32: eight partial sums over the inputs, added at the end in one order,
// whatever the number of rows. Scales enter after the sum.
#pragma once

#include <algorithm>

#include "activations.h"
#include "kernels.h"
#include "rounding.h"
#include "scratch.h"

namespace bitsmith {

constexpr float kE4m3Max = 448.0f;
constexpr int64_t kDecodedRows = 12;  // weights that are decoded once for many tokens

struct OfFp8Weights;

// `static_scale` 0: each token has its own scale, largest magnitude / 448 (a token of zeros has scale 0).
template <class V>
void arrange_fp8(const Fp8Linear& p, const float* source, int64_t stride, Activations mode,
                 float static_scale, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* from = source + t * stride;
    float* to = p.x + t * p.padded_in;
    std::copy(from, from + p.in_features, to);
    std::fill(to + p.in_features, to + p.padded_in, 0.0f);
    p.x_scale[t] = 1.0f;
    if (mode == Activations::kBfloat16) {
      for (int64_t k = 0; k < p.in_features; ++k) to[k] = round_to_bf16(to[k]);
    }
    if (mode != Activations::kE4m3) continue;
    const float scale = static_scale > 0.0f ? static_scale : largest_magnitude<V>(to, p.padded_in) / kE4m3Max;
    p.x_scale[t] = scale;
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t k = 0; k < p.in_features; ++k) to[k] = round_to_e4m3(to[k] / divisor);
  }
}

// Eight weights times kE4m3AsHalf: from bytes, or from what was decoded before.
template <class V>
inline V load_weights(const uint8_t* p) {
  return V::load_e4m3(p);
}
template <class V>
inline V load_weights(const float* p) {
  return V::load(p);
}

// weight: the first of `num_rows` rows, of which row `row` of the output is the first.
template <class V, int num_tokens, int num_rows, class W>
inline void fp8_tile(const Fp8Linear& p, const W* weight, int64_t token, int64_t row) {
  const float* x = p.x + token * p.padded_in;
  V sum[num_tokens][num_rows];
  for (auto& of_token : sum)
    for (V& s : of_token) s = V::set(0.0f);
  for (int64_t k = 0; k < p.padded_in; k += 8) {
    V w[num_rows];
    for (int n = 0; n < num_rows; ++n) w[n] = load_weights<V>(weight + n * p.padded_in + k);
    for (int t = 0; t < num_tokens; ++t) {
      V value = V::load(x + t * p.padded_in + k);
      value.pin();
      for (int n = 0; n < num_rows; ++n) sum[t][n] = V::fma(w[n], value, sum[t][n]);
    }
  }
  for (int t = 0; t < num_tokens; ++t) {
    for (int n = 0; n < num_rows; ++n) {
      const float scale = p.scale[row + n] * p.x_scale[token + t] / kE4m3AsHalf;
      const float bias = p.bias == nullptr ? 0.0f : p.bias[row + n];
      p.y[(token + t) * p.out_features + row + n] = sum_lanes(sum[t][n]) * scale + bias;
    }
  }
}

// Rows [begin, end) for a few tokens. weight: row `begin`.
template <class V, int num_tokens, int num_rows, class W>
inline void fp8_rows(const Fp8Linear& p, const W* weight, int64_t token, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + num_rows <= end; row += num_rows, weight += num_rows * p.padded_in) {
    fp8_tile<V, num_tokens, num_rows>(p, weight, token, row);
  }
  for (; row < end; ++row, weight += p.padded_in) fp8_tile<V, num_tokens, 1>(p, weight, token, row);
}

// Rows [begin, end) for all tokens. weight: row `begin`.
template <class V, class W>
inline void fp8_tokens(const Fp8Linear& p, const W* weight, int64_t begin, int64_t end) {
  int64_t t = 0;
  for (; t + 3 <= p.num_tokens; t += 3) fp8_rows<V, 3, 3>(p, weight, t, begin, end);
  if (p.num_tokens - t == 2) fp8_rows<V, 2, 4>(p, weight, t, begin, end);
  if (p.num_tokens - t == 1) fp8_rows<V, 1, 6>(p, weight, t, begin, end);
}

template <class V>
void linear_fp8(const Fp8Linear& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; row += kDecodedRows) {
    const int64_t end = std::min(row + kDecodedRows, row_end);
    const uint8_t* weight = p.weight + row * p.padded_in;
    if (p.num_tokens <= 3) {
      fp8_tokens<V>(p, weight, row, end);
      continue;
    }
    float* decoded = scratch<float, OfFp8Weights>(kDecodedRows * p.padded_in);
    for (int64_t k = 0; k < (end - row) * p.padded_in; k += 8) V::load_e4m3(weight + k).store(decoded + k);
    fp8_tokens<V>(p, static_cast<const float*>(decoded), row, end);
  }
}

}  // namespace bitsmith

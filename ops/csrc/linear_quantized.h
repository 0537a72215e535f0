// Products with 4- and 8-bit weights in blocks of 16 output rows. A lane is an output row, so nothing is
// added across lanes. Inside a group sums are integers (int8 activations) or fp32 in order of the inputs;
// groups are added in order, each times its scale.
#pragma once

#include <algorithm>

#include "integer_dot.h"
#include "kernels.h"
#include "rounding.h"

namespace bitsmith {

// Sixteen scales of one row block and group.
template <class V>
inline void load_scales(const QuantizedLinear& p, int64_t at, V& low, V& high) {
  if (p.scale_is_bf16) {
    const uint16_t* scale = static_cast<const uint16_t*>(p.scale) + at;
    low = V::load_bf16(scale);
    high = V::load_bf16(scale + 8);
  } else {
    const float* scale = static_cast<const float*>(p.scale) + at;
    low = V::load(scale);
    high = V::load(scale + 8);
  }
}

template <class V>
inline void store_block(const QuantizedLinear& p, int64_t token, int64_t block, V low, V high) {
  const int64_t row = block * kRowBlock;
  const int64_t num_rows = p.out_features - row < kRowBlock ? p.out_features - row : kRowBlock;
  float* y = p.y + token * p.out_features + row;
  if (num_rows == kRowBlock) {
    if (p.bias != nullptr) {
      low = low + V::load(p.bias + row);
      high = high + V::load(p.bias + row + 8);
    }
    low.store(y);
    high.store(y + 8);
    return;
  }
  float result[kRowBlock];
  low.store(result);
  high.store(result + 8);
  for (int64_t i = 0; i < num_rows; ++i) y[i] = p.bias == nullptr ? result[i] : result[i] + p.bias[row + i];
}

template <class V, int num_tokens>
inline void add_input(V low, V high, const float* x, int64_t x_stride, V (&sum)[num_tokens][2]) {
  for (int t = 0; t < num_tokens; ++t) {
    const V value = V::set(x[t * x_stride]);
    sum[t][0] = V::fma(low, value, sum[t][0]);
    sum[t][1] = V::fma(high, value, sum[t][1]);
  }
}

template <class V, int num_bits, int place, int num_tokens>
inline void add_inputs(const uint8_t* w, V zero_low, V zero_high, const float* x, int64_t x_stride,
                       V (&sum)[num_tokens][2]) {
  if constexpr (num_bits == 4) {
    constexpr int nibble = place < 4 ? 2 * place : 2 * place - 7;
    add_input<V, num_tokens>(V::template nibble<nibble>(w) - zero_low,
                             V::template nibble<nibble>(w + 32) - zero_high, x + place, x_stride, sum);
    if constexpr (place < 7)
      add_inputs<V, 4, place + 1, num_tokens>(w, zero_low, zero_high, x, x_stride, sum);
  } else {
    add_input<V, num_tokens>(V::template signed_byte<place>(w) - zero_low,
                             V::template signed_byte<place>(w + 32) - zero_high, x + place, x_stride, sum);
    if constexpr (place < 3)
      add_inputs<V, 8, place + 1, num_tokens>(w, zero_low, zero_high, x, x_stride, sum);
  }
}

template <class V, int num_bits, int num_tokens>
inline void float_tile(const QuantizedLinear& p, int64_t token, int64_t block) {
  constexpr int64_t kInputs = 32 / num_bits;  // inputs in 64 bytes
  const float* x = p.activations.x + token * p.in_features;
  const uint8_t* w = p.weight + block * (p.in_features / kInputs) * 64;
  const V offset = V::set(num_bits == 4 ? 8.0f : 0.0f);
  V total[num_tokens][2];
  for (auto& of_token : total) of_token[0] = of_token[1] = V::set(0.0f);
  for (int64_t group = 0; group < p.num_groups; ++group) {
    const int64_t at = (block * p.num_groups + group) * kRowBlock;
    V zero_low = offset, zero_high = offset;
    if (p.zero_point != nullptr) {
      zero_low = zero_low + V::from_int8(p.zero_point + at);
      zero_high = zero_high + V::from_int8(p.zero_point + at + 8);
    }
    V sum[num_tokens][2];
    for (auto& of_token : sum) of_token[0] = of_token[1] = V::set(0.0f);
    for (int64_t k = 0; k < p.group_size; k += kInputs, w += 64, x += kInputs) {
      add_inputs<V, num_bits, 0, num_tokens>(w, zero_low, zero_high, x, p.in_features, sum);
    }
    V scale_low, scale_high;
    load_scales(p, at, scale_low, scale_high);
    for (int t = 0; t < num_tokens; ++t) {
      total[t][0] = V::fma(sum[t][0], scale_low, total[t][0]);
      total[t][1] = V::fma(sum[t][1], scale_high, total[t][1]);
    }
  }
  for (int t = 0; t < num_tokens; ++t) store_block(p, token + t, block, total[t][0], total[t][1]);
}

template <class V, int num_bits, int num_tokens>
inline void integer_tile(const QuantizedLinear& p, int64_t token, int64_t block) {
  constexpr int64_t kInputs = 32 / num_bits;
  const int64_t group_bytes = p.group_size / kInputs * 64;
  const uint8_t* w = p.weight + block * p.num_groups * group_bytes;
  V total[num_tokens][2];
  for (auto& of_token : total) of_token[0] = of_token[1] = V::set(0.0f);
  for (int64_t group = 0; group < p.num_groups; ++group, w += group_bytes) {
    const int64_t at = (block * p.num_groups + group) * kRowBlock;
    const int8_t* zero_point = p.zero_point == nullptr ? nullptr : p.zero_point + at;
    alignas(32) int32_t dot[num_tokens][kRowBlock];
    IntegerDot<V>::template group<num_bits, num_tokens>(p, w, zero_point, token, group, dot);
    V scale_low, scale_high;
    load_scales(p, at, scale_low, scale_high);
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t of_token = (token + t) * p.num_groups + group;
      const V x_scale = V::set(p.activations.scale[of_token]);
      total[t][0] = V::fma(V::from_int32(dot[t]), scale_low * x_scale, total[t][0]);
      total[t][1] = V::fma(V::from_int32(dot[t] + 8), scale_high * x_scale, total[t][1]);
    }
  }
  for (int t = 0; t < num_tokens; ++t) store_block(p, token + t, block, total[t][0], total[t][1]);
}

template <class V, int num_bits, bool is_int8, int num_tokens>
inline void quantized_tile(const QuantizedLinear& p, int64_t token, int64_t block) {
  if constexpr (is_int8) {
    integer_tile<V, num_bits, num_tokens>(p, token, block);
  } else {
    float_tile<V, num_bits, num_tokens>(p, token, block);
  }
}

// Activations of so many tokens stay in the first-level cache while the row blocks pass.
constexpr int64_t kTokenBytes = 20 << 10;

template <class V, int num_bits, bool is_int8>
void linear_quantized_typed(const QuantizedLinear& p, int64_t block_begin, int64_t block_end) {
  const int64_t token_bytes = p.in_features * (!is_int8 ? 4 : num_bits == 4 ? 1 : 2);
  const int64_t step = std::max<int64_t>(8, kTokenBytes / token_bytes / 4 * 4);
  for (int64_t begin = 0; begin < p.num_tokens; begin += step) {
    const int64_t end = std::min(begin + step, p.num_tokens);
    for (int64_t block = block_begin; block < block_end; ++block) {
      int64_t t = begin;
      for (; t + 4 <= end; t += 4) quantized_tile<V, num_bits, is_int8, 4>(p, t, block);
      if (end - t == 3) quantized_tile<V, num_bits, is_int8, 3>(p, t, block);
      if (end - t == 2) quantized_tile<V, num_bits, is_int8, 2>(p, t, block);
      if (end - t == 1) quantized_tile<V, num_bits, is_int8, 1>(p, t, block);
    }
  }
}

template <class V>
void linear_quantized(const QuantizedLinear& p, int64_t block_begin, int64_t block_end) {
  if (p.num_bits == 4 && p.is_int8) {
    linear_quantized_typed<V, 4, true>(p, block_begin, block_end);
  } else if (p.num_bits == 4) {
    linear_quantized_typed<V, 4, false>(p, block_begin, block_end);
  } else if (p.is_int8) {
    linear_quantized_typed<V, 8, true>(p, block_begin, block_end);
  } else {
    linear_quantized_typed<V, 8, false>(p, block_begin, block_end);
  }
}

}  // namespace bitsmith

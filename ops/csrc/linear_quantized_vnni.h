// Products of 4- and 8-bit weights with int8 activations by vpdpbusd: four unsigned weights times four signed
// activations, added to a 32-bit lane. The packed layout holds four inputs of sixteen rows in 64 bytes, so a
// lane is an output row. Nibbles are stored unsigned; bytes are made so by adding 128, and 128 times the sum
// of the activations is taken off again. Sums of a group are exact, groups are added in the order of
// `linear_quantized.h`: results are the same bits.
#pragma once

#include <algorithm>

#include "linear_quantized.h"

namespace bitsmith {

constexpr int kByteOffset = 128;

// Registers with four inputs of each row, in order, from 64 bytes.
template <class R, int num_bits>
struct UnsignedWeights {
  static constexpr int kParts = num_bits == 4 ? 2 : 1;
  typename R::Integers parts[kParts];

  explicit UnsignedWeights(const uint8_t* w) {
    const auto bytes = R::load(w);
    if constexpr (num_bits == 4) {
      parts[0] = R::low_nibbles(bytes);
      parts[1] = R::high_nibbles(bytes);
    } else {
      parts[0] = R::to_unsigned(bytes);
    }
  }
};

// Where tokens are few, a token has several sums: an instruction waits for the one before it.
template <class R, int num_tokens>
constexpr int kSumsPerToken = std::clamp(R::kTokens / num_tokens, 1, 4);

template <class R, int num_tokens>
using GroupSums = typename R::Integers[num_tokens][kSumsPerToken<R, num_tokens>];

template <class R, int num_bits, int num_tokens, int num_chunks>
inline __attribute__((always_inline)) void add_chunks(const uint8_t* w, const int8_t* x, int64_t x_stride,
                                                      GroupSums<R, num_tokens>& sum) {
  using Weights = UnsignedWeights<R, num_bits>;
#pragma GCC unroll 4
  for (int c = 0; c < num_chunks; ++c) {
    if constexpr (num_tokens == 1) __builtin_prefetch(w + c * 64 + kPrefetchBytes);
    const Weights weights(w + c * 64);
#pragma GCC unroll 2
    for (int i = 0; i < Weights::kParts; ++i) {
      const int part = c * Weights::kParts + i;
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        auto& of_token = sum[t][part % kSumsPerToken<R, num_tokens>];
        of_token = R::add_products(of_token, weights.parts[i], x + t * x_stride + part * 4);
      }
    }
  }
}

// sum[t][0] = sum over the group of (q - zero_point) * activation, for each row. w: the group's weights.
template <class R, int num_bits, int num_tokens>
inline __attribute__((always_inline)) void sum_group(const QuantizedLinear& p, const uint8_t* w,
                                                     const int8_t* zero_point, int64_t token, int64_t group,
                                                     GroupSums<R, num_tokens>& sum) {
  constexpr int64_t kInputs = 32 / num_bits, kChunks = 4;
  constexpr int32_t kOffset = num_bits == 4 ? kNibbleOffset : kByteOffset;
  for (int t = 0; t < num_tokens; ++t) {
    const int32_t minus = -p.activations.sum[(token + t) * p.num_groups + group];
    for (auto& part : sum[t]) part = R::set(0);
    sum[t][0] = zero_point == nullptr ? R::set(kOffset * minus) : R::zero_points(zero_point, kOffset, minus);
  }
  const int8_t* x = p.activations.x_int8 + token * p.in_features + group * p.group_size;
  const int8_t* end = x + p.group_size;
  for (; x + kChunks * kInputs <= end; x += kChunks * kInputs, w += kChunks * 64) {
    add_chunks<R, num_bits, num_tokens, kChunks>(w, x, p.in_features, sum);
  }
  for (; x < end; x += kInputs, w += 64) add_chunks<R, num_bits, num_tokens, 1>(w, x, p.in_features, sum);
  for (auto& of_token : sum)
    for (int i = 1; i < kSumsPerToken<R, num_tokens>; ++i) of_token[0] = R::add(of_token[0], of_token[i]);
}

template <class R, int num_bits, int num_tokens>
inline void vnni_tile(const QuantizedLinear& p, int64_t token, int64_t block) {
  const int64_t group_bytes = p.group_size * num_bits / 32 * 64;
  const uint8_t* w = p.weight + block * p.num_groups * group_bytes;
  typename R::Floats total[num_tokens];
  for (auto& of_token : total) of_token = R::zeros();
  for (int64_t group = 0; group < p.num_groups; ++group, w += group_bytes) {
    const int64_t at = (block * p.num_groups + group) * kRowBlock;
    GroupSums<R, num_tokens> sum;
    sum_group<R, num_bits, num_tokens>(p, w, p.zero_point == nullptr ? nullptr : p.zero_point + at, token,
                                       group, sum);
    const auto scale = p.scale_is_bf16 ? R::load_bf16(static_cast<const uint16_t*>(p.scale) + at)
                                       : R::load_floats(static_cast<const float*>(p.scale) + at);
    for (int t = 0; t < num_tokens; ++t) {
      const float x_scale = p.activations.scale[(token + t) * p.num_groups + group];
      total[t] = R::add_scaled(total[t], sum[t][0], scale, x_scale);
    }
  }
  for (int t = 0; t < num_tokens; ++t)
    store_block(p, token + t, block, R::low_half(total[t]), R::high_half(total[t]));
}

// Tokens [begin, end) of one row block, in tiles of at most `num_tokens`.
template <class R, int num_bits, int num_tokens>
void vnni_tokens(const QuantizedLinear& p, int64_t begin, int64_t end, int64_t block) {
  for (; begin + num_tokens <= end; begin += num_tokens) vnni_tile<R, num_bits, num_tokens>(p, begin, block);
  if constexpr (num_tokens > 1) vnni_tokens<R, num_bits, num_tokens / 2>(p, begin, end, block);
}

template <class R, int num_bits>
void linear_vnni(const QuantizedLinear& p, int64_t block_begin, int64_t block_end) {
  // Activations of so many tokens stay in the first-level cache while the row blocks pass.
  const int64_t step = std::max<int64_t>(1, kTokenBytes / p.in_features / R::kTokens) * R::kTokens;
  for (int64_t begin = 0; begin < p.num_tokens; begin += step) {
    const int64_t end = std::min(begin + step, p.num_tokens);
    for (int64_t block = block_begin; block < block_end; ++block)
      vnni_tokens<R, num_bits, R::kTokens>(p, begin, end, block);
  }
}

// Activations that are not int8 are multiplied as AVX2 does it.
template <class R>
void linear_quantized_vnni(const QuantizedLinear& p, int64_t block_begin, int64_t block_end) {
  if (!p.is_int8) {
    linear_quantized<Avx2Vector8>(p, block_begin, block_end);
  } else if (p.num_bits == 4) {
    linear_vnni<R, 4>(p, block_begin, block_end);
  } else {
    linear_vnni<R, 8>(p, block_begin, block_end);
  }
}

}  // namespace bitsmith

// Products with bf16 or fp32 weights, row-major: 16 inputs at a time, two vectors of eight lanes.
// An output is eight partial sums over the inputs, added at the end in one order; tiles differ only in how
// many outputs they hold in registers.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "rounding.h"

namespace bitsmith {

constexpr int64_t kChunk = 16;

// Activations padded with zeros to whole chunks. With bf16 weights the eight at even places of a chunk come
// first, because that is how a pair of bf16 is widened.
template <class V>
void arrange_dense(const DenseLinear& p, const float* source, int64_t stride, bool round_bf16, float* x,
                   int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* from = source + t * stride;
    float* to = x + t * p.padded_in;
    for (int64_t k = p.in_features / kChunk * kChunk; k < p.padded_in; ++k) to[k] = 0.0f;
    for (int64_t k = 0; k < p.in_features; ++k) {
      const int64_t place = p.is_bf16 ? k / kChunk * kChunk + k % 2 * 8 + k % kChunk / 2 : k;
      to[place] = round_bf16 ? round_to_bf16(from[k]) : from[k];
    }
  }
}

// Eight of the sixteen inputs of a chunk: with bf16 weights those at even or odd places.
template <class V, bool is_bf16, int half>
inline V load_half(const void* row, int64_t k) {
  if constexpr (!is_bf16) {
    return V::load(static_cast<const float*>(row) + k + 8 * half);
  } else if constexpr (half == 0) {
    return V::even_bf16(static_cast<const uint16_t*>(row) + k);
  } else {
    return V::odd_bf16(static_cast<const uint16_t*>(row) + k);
  }
}

template <class V, bool is_bf16, int half, int num_tokens, int num_rows>
inline void add_half(const void* const* rows, int64_t k, const float* x, int64_t x_stride,
                     V (&sum)[num_tokens][num_rows]) {
  V weight[num_rows];
  for (int n = 0; n < num_rows; ++n) weight[n] = load_half<V, is_bf16, half>(rows[n], k);
  for (int t = 0; t < num_tokens; ++t) {
    V value = V::load(x + t * x_stride + 8 * half);
    value.pin();
    for (int n = 0; n < num_rows; ++n) sum[t][n] = V::fma(weight[n], value, sum[t][n]);
  }
}

template <class V, bool is_bf16, int num_tokens, int num_rows>
inline void add_chunk(const void* const* rows, int64_t k, const float* x, int64_t x_stride,
                      V (&sum)[num_tokens][num_rows]) {
  add_half<V, is_bf16, 0, num_tokens, num_rows>(rows, k, x, x_stride, sum);
  add_half<V, is_bf16, 1, num_tokens, num_rows>(rows, k, x, x_stride, sum);
}

template <class V, bool is_bf16, int num_tokens, int num_rows>
inline void dense_tile(const DenseLinear& p, int64_t token, int64_t row) {
  const size_t item = is_bf16 ? 2 : 4;
  const char* weight = static_cast<const char*>(p.weight);
  const float* x = p.x + token * p.padded_in;
  const void* rows[num_rows];
  for (int n = 0; n < num_rows; ++n) rows[n] = weight + static_cast<size_t>((row + n) * p.in_features) * item;
  V sum[num_tokens][num_rows];
  for (auto& of_token : sum)
    for (V& s : of_token) s = V::set(0.0f);
  const int64_t whole = p.in_features / kChunk * kChunk;
  const int64_t tile_bytes = p.in_features * num_rows * static_cast<int64_t>(item);
  const char* ahead = static_cast<const char*>(rows[0]) + std::max(kPrefetchBytes, tile_bytes);
  for (int64_t k = 0; k < whole; k += kChunk) {
    if constexpr (num_tokens == 1) {
      constexpr int64_t kBytes = num_rows * kChunk * (is_bf16 ? 2 : 4);
      for (int64_t b = 0; b < kBytes; b += 64) __builtin_prefetch(ahead + k / kChunk * kBytes + b);
    }
    add_chunk<V, is_bf16, num_tokens, num_rows>(rows, k, x + k, p.padded_in, sum);
  }
  if (whole < p.in_features) {
    alignas(32) char tail[num_rows][kChunk * 4] = {};  // a row's last inputs, without reading past its end
    const void* tails[num_rows];
    for (int n = 0; n < num_rows; ++n) {
      std::memcpy(tail[n], static_cast<const char*>(rows[n]) + static_cast<size_t>(whole) * item,
                  static_cast<size_t>(p.in_features - whole) * item);
      tails[n] = tail[n];
    }
    add_chunk<V, is_bf16, num_tokens, num_rows>(tails, 0, x + whole, p.padded_in, sum);
  }
  for (int t = 0; t < num_tokens; ++t) {
    for (int n = 0; n < num_rows; ++n) {
      const float bias = p.bias == nullptr ? 0.0f : p.bias[row + n];
      p.y[(token + t) * p.out_features + row + n] = sum_lanes(sum[t][n]) + bias;
    }
  }
}

template <class V, bool is_bf16, int num_tokens, int num_rows>
inline void dense_rows(const DenseLinear& p, int64_t token, int64_t row_begin, int64_t row_end) {
  int64_t row = row_begin;
  for (; row + num_rows <= row_end; row += num_rows) {
    dense_tile<V, is_bf16, num_tokens, num_rows>(p, token, row);
  }
  for (; row < row_end; ++row) dense_tile<V, is_bf16, num_tokens, 1>(p, token, row);
}

template <class V, bool is_bf16>
void linear_dense_typed(const DenseLinear& p, int64_t row_begin, int64_t row_end) {
  // Activations of a block of tokens stay in the second-level cache, weights of a few rows in the first.
  const int64_t tokens = std::max<int64_t>(3, (192 << 10) / (p.padded_in * 4) / 3 * 3);
  const int64_t rows = std::max<int64_t>(1, (12 << 10) / (p.in_features * (is_bf16 ? 2 : 4)) / 12) * 12;
  for (int64_t t0 = 0; t0 < p.num_tokens; t0 += tokens) {
    const int64_t t1 = std::min(t0 + tokens, p.num_tokens);
    for (int64_t n0 = row_begin; n0 < row_end; n0 += rows) {
      const int64_t n1 = std::min(n0 + rows, row_end);
      int64_t t = t0;
      for (; t + 3 <= t1; t += 3) dense_rows<V, is_bf16, 3, 3>(p, t, n0, n1);
      if (t1 - t == 2) dense_rows<V, is_bf16, 2, 4>(p, t, n0, n1);
      if (t1 - t == 1) dense_rows<V, is_bf16, 1, 6>(p, t, n0, n1);
    }
  }
}

template <class V>
void linear_dense(const DenseLinear& p, int64_t row_begin, int64_t row_end) {
  if (p.is_bf16) {
    linear_dense_typed<V, true>(p, row_begin, row_end);
  } else {
    linear_dense_typed<V, false>(p, row_begin, row_end);
  }
}

}  // namespace bitsmith

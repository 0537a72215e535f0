// Products with bf16 or fp32 weights, two output rows in one register of AVX-512: each row's eight partial
// sums are those of `linear_dense.h`, added in the same order, so results are the same bits.
#pragma once

#include <algorithm>

#include "linear_dense.h"
#include "rows16_avx512.h"

#ifdef BITSMITH_HAS_AVX512_VNNI

namespace bitsmith {

// 32 bytes from each of two rows.
inline __m512i load_pair(const void* const* rows, int64_t byte) {
  const auto* low = reinterpret_cast<const __m256i*>(static_cast<const char*>(rows[0]) + byte);
  const auto* high = reinterpret_cast<const __m256i*>(static_cast<const char*>(rows[1]) + byte);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)), _mm256_loadu_si256(high), 1);
}

// Eight of the sixteen inputs of a chunk, of two rows: with bf16 weights those at even or odd places.
template <bool is_bf16, int half>
inline __m512 load_half_pair(const void* const* rows, int64_t k) {
  if constexpr (!is_bf16) {
    return _mm512_castsi512_ps(load_pair(rows, (k + 8 * half) * 4));
  } else if constexpr (half == 0) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(load_pair(rows, k * 2), 16));
  } else {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(load_pair(rows, k * 2), upper));
  }
}

template <bool is_bf16, int half, int num_tokens, int num_pairs>
inline void add_half_pairs(const void* const* rows, int64_t k, const float* x, int64_t x_stride,
                           __m512 (&sum)[num_tokens][num_pairs]) {
  __m512 weight[num_pairs];
  for (int n = 0; n < num_pairs; ++n) weight[n] = load_half_pair<is_bf16, half>(rows + 2 * n, k);
  for (int t = 0; t < num_tokens; ++t) {
    const __m512 value = _mm512_broadcast_f32x8(_mm256_loadu_ps(x + t * x_stride + 8 * half));
    for (int n = 0; n < num_pairs; ++n) sum[t][n] = _mm512_fmadd_ps(weight[n], value, sum[t][n]);
  }
}

template <bool is_bf16, int num_tokens, int num_pairs>
inline void dense_pairs_tile(const DenseLinear& p, int64_t token, int64_t row) {
  constexpr int kRows = 2 * num_pairs;
  constexpr int64_t kItem = is_bf16 ? 2 : 4, kChunkBytes = kRows * kChunk * kItem;
  const int64_t row_bytes = p.in_features * kItem, whole = p.in_features / kChunk * kChunk;
  const char* weight = static_cast<const char*>(p.weight) + row * row_bytes;
  const char* ahead = weight + std::max(kPrefetchBytes, kRows * row_bytes);
  const float* x = p.x + token * p.padded_in;
  const void* rows[kRows];
  for (int n = 0; n < kRows; ++n) rows[n] = weight + n * row_bytes;
  __m512 sum[num_tokens][num_pairs];
  for (auto& of_token : sum)
    for (__m512& s : of_token) s = _mm512_setzero_ps();
  for (int64_t k = 0; k < whole; k += kChunk) {
    if constexpr (num_tokens == 1) {
      for (int64_t b = 0; b < kChunkBytes; b += 64) __builtin_prefetch(ahead + k / kChunk * kChunkBytes + b);
    }
    add_half_pairs<is_bf16, 0, num_tokens, num_pairs>(rows, k, x + k, p.padded_in, sum);
    add_half_pairs<is_bf16, 1, num_tokens, num_pairs>(rows, k, x + k, p.padded_in, sum);
  }
  if (whole < p.in_features) {
    alignas(64) char tail[kRows][kChunk * kItem] = {};  // last inputs, without reading past a row's end
    const void* tails[kRows];
    for (int n = 0; n < kRows; ++n) {
      std::memcpy(tail[n], weight + n * row_bytes + whole * kItem,
                  static_cast<size_t>(row_bytes - whole * kItem));
      tails[n] = tail[n];
    }
    add_half_pairs<is_bf16, 0, num_tokens, num_pairs>(tails, 0, x + whole, p.padded_in, sum);
    add_half_pairs<is_bf16, 1, num_tokens, num_pairs>(tails, 0, x + whole, p.padded_in, sum);
  }
  for (int t = 0; t < num_tokens; ++t) {
    float* y = p.y + (token + t) * p.out_features + row;
    for (int n = 0; n < num_pairs; ++n) {
      const float* bias = p.bias == nullptr ? nullptr : p.bias + row + 2 * n;
      y[2 * n] = sum_lanes(Avx512Rows16::low_half(sum[t][n])) + (bias == nullptr ? 0.0f : bias[0]);
      y[2 * n + 1] = sum_lanes(Avx512Rows16::high_half(sum[t][n])) + (bias == nullptr ? 0.0f : bias[1]);
    }
  }
}

// Rows [row_begin, row_end) of tokens [token, end), in tiles of at most `num_tokens`.
template <bool is_bf16, int num_tokens>
void dense_pairs(const DenseLinear& p, int64_t token, int64_t end, int64_t row_begin, int64_t row_end) {
  constexpr int kPairs = num_tokens >= 4 ? 3 : 6;  // sums and weights in at most 28 of the 32 registers
  for (; token + num_tokens <= end; token += num_tokens) {
    int64_t row = row_begin;
    for (; row + 2 * kPairs <= row_end; row += 2 * kPairs)
      dense_pairs_tile<is_bf16, num_tokens, kPairs>(p, token, row);
    for (; row + 2 <= row_end; row += 2) dense_pairs_tile<is_bf16, num_tokens, 1>(p, token, row);
    if (row < row_end)
      for (int t = 0; t < num_tokens; ++t) dense_tile<Avx2Vector8, is_bf16, 1, 1>(p, token + t, row);
  }
  if constexpr (num_tokens > 1) dense_pairs<is_bf16, num_tokens / 2>(p, token, end, row_begin, row_end);
}

template <bool is_bf16>
void linear_dense_avx512_typed(const DenseLinear& p, int64_t row_begin, int64_t row_end) {
  // Activations of a block of tokens stay in the second-level cache, weights of a few rows in the first.
  const int64_t tokens = std::max<int64_t>(1, (192 << 10) / (p.padded_in * 4) / 8) * 8;
  const int64_t rows = std::max<int64_t>(1, (12 << 10) / (p.in_features * (is_bf16 ? 2 : 4)) / 12) * 12;
  for (int64_t t0 = 0; t0 < p.num_tokens; t0 += tokens) {
    const int64_t t1 = std::min(t0 + tokens, p.num_tokens);
    for (int64_t n0 = row_begin; n0 < row_end; n0 += rows)
      dense_pairs<is_bf16, 8>(p, t0, t1, n0, std::min(n0 + rows, row_end));
  }
}

inline void linear_dense_avx512(const DenseLinear& p, int64_t row_begin, int64_t row_end) {
  if (p.is_bf16) {
    linear_dense_avx512_typed<true>(p, row_begin, row_end);
  } else {
    linear_dense_avx512_typed<false>(p, row_begin, row_end);
  }
}

}  // namespace bitsmith

#endif

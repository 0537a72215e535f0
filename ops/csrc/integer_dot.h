// Exact integer dot products of one group: 16 output rows by a few tokens, zero points taken off. Any order
// gives the same sum, so a form is free in how it adds.
#pragma once

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

constexpr int kNibbleOffset = 8;  // 4-bit weights are stored as q + 8

template <class V>
struct IntegerDot {
  // dot[t][row] = sum over the group of (q - zero_point) * activation.
  template <int num_bits, int num_tokens>
  static void group(const QuantizedLinear& p, const uint8_t* w, const int8_t* zero_point, int64_t token,
                    int64_t group, int32_t (&dot)[num_tokens][kRowBlock]) {
    constexpr int64_t kInputs = 32 / num_bits;
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t start = (token + t) * p.in_features + group * p.group_size;
      const int32_t sum = p.activations.sum[(token + t) * p.num_groups + group];
      for (int r = 0; r < kRowBlock; ++r) {
        const int32_t offset = num_bits == 4 ? kNibbleOffset : 0;
        dot[t][r] = -sum * (zero_point == nullptr ? offset : offset + zero_point[r]);
      }
      for (int64_t k = 0; k < p.group_size; k += kInputs) {
        const uint8_t* bytes = w + k / kInputs * 64;
        for (int r = 0; r < kRowBlock; ++r) dot[t][r] += chunk<num_bits>(p, bytes + r * 4, start + k);
      }
    }
  }

 private:
  template <int num_bits>
  static int32_t chunk(const QuantizedLinear& p, const uint8_t* bytes, int64_t at) {
    int32_t sum = 0;
    for (int j = 0; j < 4; ++j) {
      if constexpr (num_bits == 4) {
        const int8_t* x = p.activations.x_int8 + at;
        sum += (bytes[j] & 15) * x[j] + (bytes[j] >> 4) * x[j + 4];
      } else {
        constexpr int kPlace[4] = {0, 2, 1, 3};  // where input j of four stands in `x_int16`
        sum += static_cast<int8_t>(bytes[j]) * p.activations.x_int16[at + kPlace[j]];
      }
    }
    return sum;
  }
};

#ifdef BITSMITH_HAS_AVX2

template <>
struct IntegerDot<Avx2Vector8> {
  template <int num_bits, int num_tokens>
  static inline __attribute__((always_inline)) void group(const QuantizedLinear& p, const uint8_t* w,
                                                          const int8_t* zero_point, int64_t token,
                                                          int64_t group,
                                                          int32_t (&dot)[num_tokens][kRowBlock]) {
    __m256i sum[num_tokens][2];
    start<num_bits, num_tokens>(p, zero_point, token, group, sum);
    const int64_t at = token * p.in_features + group * p.group_size;
    if constexpr (num_bits == 4) {
      // At most 4 chunks of 8 inputs, 8 products of 15 * 127 each, fit in 16 bits.
      int64_t k = 0;
      for (; k + 32 <= p.group_size; k += 32, w += 256) add_nibbles<num_tokens, 4>(p, w, at + k, sum);
      for (; k < p.group_size; k += 8, w += 64) add_nibbles<num_tokens, 1>(p, w, at + k, sum);
    } else {
      for (int64_t k = 0; k < p.group_size; k += 4, w += 64) add_bytes<num_tokens>(p, w, at + k, sum);
    }
    for (int t = 0; t < num_tokens; ++t) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(dot[t]), sum[t][0]);
      _mm256_store_si256(reinterpret_cast<__m256i*>(dot[t] + 8), sum[t][1]);
    }
  }

 private:
  static __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  static __m256i four_bytes(const void* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof(word));
    return _mm256_set1_epi32(word);
  }

  // The empty statement keeps the compiler from regrouping a chain of sums, which spills registers.
  static __m256i add_products(__m256i sum, __m256i weights, __m256i x) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
    __asm__("" : "+x"(sum));
    return sum;
  }
  static __m256i add_word_products(__m256i sum, __m256i weights, __m256i x) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, x));
    __asm__("" : "+x"(sum));
    return sum;
  }

  // Minus zero point times the sum of the activations.
  template <int num_bits, int num_tokens>
  static inline __attribute__((always_inline)) void start(const QuantizedLinear& p, const int8_t* zero_point,
                                                          int64_t token, int64_t group,
                                                          __m256i (&sum)[num_tokens][2]) {
    constexpr int kOffset = num_bits == 4 ? kNibbleOffset : 0;
    const int32_t* x_sum = p.activations.sum + token * p.num_groups + group;
    if (zero_point == nullptr) {
      for (int t = 0; t < num_tokens; ++t)
        sum[t][0] = sum[t][1] = _mm256_set1_epi32(-kOffset * x_sum[t * p.num_groups]);
      return;
    }
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zero_point));
    const __m256i offset = _mm256_set1_epi32(kOffset);
    const __m256i low = _mm256_add_epi32(_mm256_cvtepi8_epi32(bytes), offset);
    const __m256i high = _mm256_add_epi32(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)), offset);
    for (int t = 0; t < num_tokens; ++t) {
      const __m256i minus = _mm256_set1_epi32(-x_sum[t * p.num_groups]);
      sum[t][0] = _mm256_mullo_epi32(low, minus);
      sum[t][1] = _mm256_mullo_epi32(high, minus);
    }
  }

  // Unsigned nibbles times signed activations, in 16 bits over the chunks, then widened.
  template <int num_tokens, int num_chunks>
  static inline __attribute__((always_inline)) void add_nibbles(const QuantizedLinear& p, const uint8_t* w,
                                                                int64_t at, __m256i (&sum)[num_tokens][2]) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i pairs[num_tokens][2];
    for (auto& of_token : pairs) of_token[0] = of_token[1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int c = 0; c < num_chunks; ++c) {
      if constexpr (num_tokens == 1) __builtin_prefetch(w + c * 64 + kPrefetchBytes);
      const __m256i low_rows = load(w + c * 64), high_rows = load(w + c * 64 + 32);
      const __m256i low0 = _mm256_and_si256(low_rows, mask), high0 = _mm256_and_si256(high_rows, mask);
      const __m256i low1 = _mm256_and_si256(_mm256_srli_epi16(low_rows, 4), mask);
      const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(high_rows, 4), mask);
      const int8_t* x = p.activations.x_int8 + at + c * 8;
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const __m256i x0 = four_bytes(x + t * p.in_features), x1 = four_bytes(x + t * p.in_features + 4);
        pairs[t][0] = add_products(pairs[t][0], low0, x0);
        pairs[t][1] = add_products(pairs[t][1], high0, x0);
        pairs[t][0] = add_products(pairs[t][0], low1, x1);
        pairs[t][1] = add_products(pairs[t][1], high1, x1);
      }
    }
    for (int t = 0; t < num_tokens; ++t) {
      sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(pairs[t][0], ones));
      sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(pairs[t][1], ones));
    }
  }

  // Bytes widened to 16 bits: no product or sum of two can overflow, -128 included.
  template <int num_tokens>
  static inline __attribute__((always_inline)) void add_bytes(const QuantizedLinear& p, const uint8_t* w,
                                                              int64_t at, __m256i (&sum)[num_tokens][2]) {
    if constexpr (num_tokens == 1) __builtin_prefetch(w + kPrefetchBytes);
    const __m256i low_rows = load(w), high_rows = load(w + 32);
    const __m256i low_odd = _mm256_srai_epi16(low_rows, 8), high_odd = _mm256_srai_epi16(high_rows, 8);
    const __m256i low_even = _mm256_srai_epi16(_mm256_slli_epi16(low_rows, 8), 8);
    const __m256i high_even = _mm256_srai_epi16(_mm256_slli_epi16(high_rows, 8), 8);
    const int16_t* x = p.activations.x_int16 + at;
#pragma GCC unroll 8
    for (int t = 0; t < num_tokens; ++t) {
      const __m256i even = four_bytes(x + t * p.in_features), odd = four_bytes(x + t * p.in_features + 2);
      sum[t][0] = add_word_products(sum[t][0], low_even, even);
      sum[t][1] = add_word_products(sum[t][1], high_even, even);
      sum[t][0] = add_word_products(sum[t][0], low_odd, odd);
      sum[t][1] = add_word_products(sum[t][1], high_odd, odd);
    }
  }
};

#endif

}  // namespace bitsmith

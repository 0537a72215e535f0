// What a processor can do at most in a form's own instructions: bytes read, multiply-adds in fp32 and int8.
//
// Loops without loads for the arithmetic, and without arithmetic for the loads: ceilings, not products.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

constexpr int64_t kStreamUnit = 1024;  // bytes

// Eight bytes that may lie anywhere, in a type that may alias any other.
typedef uint64_t Word __attribute__((may_alias, aligned(1)));

// Sum of the 64-bit words of [begin, end), whole units. The sum proves that all was read. Words are added where
// they lie: a copy of them first, even of one line, halves the rate.
inline uint64_t stream_read(const uint8_t* data, int64_t begin, int64_t end) {
  constexpr int kLanes = 16;
  uint64_t sums[kLanes] = {};
  for (int64_t at = begin; at < end; at += kStreamUnit) {
    for (int64_t line = 0; line < kStreamUnit; line += 8 * kLanes) {
      const auto* words = reinterpret_cast<const Word*>(data + at + line);
      for (int i = 0; i < kLanes; ++i) sums[i] += words[i];
    }
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

// The compiler must take the value as used, and as changed: nothing that made it may be left out.
template <class T>
inline void keep(T& value) {
  __asm__ volatile("" : "+m"(value));
}

constexpr int kFloatChains = 10;  // enough independent sums to hide a multiply-add's latency

// Returns the number of operations done: a multiply-add is two.
template <class V>
int64_t multiply_add_fp32(int64_t num_steps) {
  V factor = V::set(0.999f), addend = V::set(0.001f), sums[kFloatChains];
  keep(factor);
  keep(addend);
  for (int i = 0; i < kFloatChains; ++i) sums[i] = V::set(static_cast<float>(i));
  for (int64_t step = 0; step < num_steps; ++step) {
#pragma GCC unroll 10
    for (int i = 0; i < kFloatChains; ++i) sums[i] = V::fma(sums[i], factor, addend);
  }
  for (V& sum : sums) keep(sum);
  return num_steps * kFloatChains * 8 * 2;
}

template <class V>
struct Int8MultiplyAdd {
  // Unsigned by signed bytes as 4-bit weights need them. Returns the number of operations done.
  static int64_t run(int64_t num_steps) {
    constexpr int kBytes = 64;
    uint8_t weights[kBytes];
    int8_t x[kBytes];
    int32_t sums[kBytes / 4] = {};
    std::memset(weights, 15, sizeof(weights));
    std::memset(x, 3, sizeof(x));
    for (int64_t step = 0; step < num_steps; ++step) {
      keep(x);
      for (int i = 0; i < kBytes; ++i) sums[i / 4] += weights[i] * x[i];
    }
    keep(sums);
    return num_steps * kBytes * 2;
  }
};

#ifdef BITSMITH_HAS_AVX2

template <>
struct Int8MultiplyAdd<Avx2Vector8> {
  // As in the product of 4-bit weights: eight sums in 16 bits, which cannot overflow, then one in 32.
  static int64_t run(int64_t num_steps) {
    constexpr int kChains = 4, kDepth = 8;
    __m256i weights = _mm256_set1_epi8(15), x = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[kChains] = {};
    for (int64_t step = 0; step < num_steps; ++step) {
      __m256i pairs[kChains] = {};
#pragma GCC unroll 8
      for (int depth = 0; depth < kDepth; ++depth) {
#pragma GCC unroll 4
        for (int i = 0; i < kChains; ++i) {
          __asm__ volatile("" : "+x"(x));  // another input each time, as far as the compiler knows
          pairs[i] = _mm256_add_epi16(pairs[i], _mm256_maddubs_epi16(weights, x));
        }
      }
      for (int i = 0; i < kChains; ++i)
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs[i], ones));
    }
    for (__m256i& sum : sums) keep(sum);
    return num_steps * kChains * kDepth * 32 * 2;
  }
};

#endif

template <class V>
int64_t multiply_add_int8(int64_t num_steps) {
  return Int8MultiplyAdd<V>::run(num_steps);
}

}  // namespace bitsmith

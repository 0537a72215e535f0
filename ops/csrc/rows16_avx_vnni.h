// Sixteen output rows in two registers of AVX2 with AVX-VNNI, a lane each; absent where the build has not
// both.
#pragma once

#include "kernels.h"
#include "vector8.h"

#if defined(BITSMITH_HAS_AVX2) && defined(__AVXVNNI__)
#define BITSMITH_HAS_AVX_VNNI 1
#endif

#ifdef BITSMITH_HAS_AVX_VNNI

#include <immintrin.h>

namespace bitsmith {

// See Avx512Rows16 for what each function does.
struct AvxVnniRows16 {
  struct Integers {
    __m256i low, high;
  };
  struct Floats {
    Avx2Vector8 low, high;
  };
  static constexpr int kTokens = 4;

  static Integers load(const uint8_t* bytes) {
    const auto* halves = reinterpret_cast<const __m256i*>(bytes);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
  }
  static Integers set(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static Integers low_nibbles(Integers bytes) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(bytes.low, mask), _mm256_and_si256(bytes.high, mask)};
  }
  static Integers high_nibbles(Integers bytes) {
    return low_nibbles({_mm256_srli_epi16(bytes.low, 4), _mm256_srli_epi16(bytes.high, 4)});
  }
  static Integers to_unsigned(Integers bytes) {
    const __m256i sign = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(bytes.low, sign), _mm256_xor_si256(bytes.high, sign)};
  }
  static Integers add(Integers a, Integers b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
  }
  static Integers add_products(Integers sum, Integers weights, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    const __m256i both = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(sum.low, weights.low, both),
            _mm256_dpbusd_avx_epi32(sum.high, weights.high, both)};
  }
  static Integers zero_points(const int8_t* zero_point, int32_t offset, int32_t factor) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zero_point));
    const Integers wide = {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
    const Integers from_offset = add(wide, set(offset)), factors = set(factor);
    return {_mm256_mullo_epi32(from_offset.low, factors.low),
            _mm256_mullo_epi32(from_offset.high, factors.high)};
  }

  static Floats zeros() { return {Avx2Vector8::set(0.0f), Avx2Vector8::set(0.0f)}; }
  static Floats load_bf16(const uint16_t* p) {
    return {Avx2Vector8::load_bf16(p), Avx2Vector8::load_bf16(p + 8)};
  }
  static Floats load_floats(const float* p) { return {Avx2Vector8::load(p), Avx2Vector8::load(p + 8)}; }
  static Floats add_scaled(Floats total, Integers sum, Floats scale, float x_scale) {
    const Avx2Vector8 x = Avx2Vector8::set(x_scale);
    const Avx2Vector8 low = {_mm256_cvtepi32_ps(sum.low)}, high = {_mm256_cvtepi32_ps(sum.high)};
    return {Avx2Vector8::fma(low, scale.low * x, total.low),
            Avx2Vector8::fma(high, scale.high * x, total.high)};
  }
  static Avx2Vector8 low_half(Floats rows) { return rows.low; }
  static Avx2Vector8 high_half(Floats rows) { return rows.high; }
};

}  // namespace bitsmith

#endif

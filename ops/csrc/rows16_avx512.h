// Sixteen output rows in one register of AVX-512, a lane each; absent where the build has not VNNI and the
// sets below.
#pragma once

#include "kernels.h"
#include "vector8.h"

#if defined(BITSMITH_HAS_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define BITSMITH_HAS_AVX512_VNNI 1
#endif

#ifdef BITSMITH_HAS_AVX512_VNNI

#include <immintrin.h>

namespace bitsmith {

struct Avx512Rows16 {
  using Integers = __m512i;  // for each row a sum, or four bytes
  using Floats = __m512;
  static constexpr int kTokens = 8;  // of a tile: sums and totals fill half of the 32 registers

  static Integers load(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
  static Integers set(int32_t value) { return _mm512_set1_epi32(value); }
  static Integers low_nibbles(Integers bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static Integers high_nibbles(Integers bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }
  // Two's complement to value + 128.
  static Integers to_unsigned(Integers bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  static Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
  // Plus four unsigned weights of each row times the same four activations; exact, modulo 2^32.
  static Integers add_products(Integers sum, Integers weights, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
  }
  // Zero points of the rows plus `offset`, times `factor`.
  static Integers zero_points(const int8_t* zero_point, int32_t offset, int32_t factor) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero_point)));
    return _mm512_mullo_epi32(_mm512_add_epi32(wide, set(offset)), set(factor));
  }

  static Floats zeros() { return _mm512_setzero_ps(); }
  static Floats load_bf16(const uint16_t* p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static Floats add_scaled(Floats total, Integers sum, Floats scale, float x_scale) {
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), both, total);
  }
  static Avx2Vector8 low_half(Floats rows) { return {_mm512_castps512_ps256(rows)}; }
  static Avx2Vector8 high_half(Floats rows) { return {_mm512_extractf32x8_ps(rows, 1)}; }
};

}  // namespace bitsmith

#endif

// Eight floats in AVX2, FMA and F16C; absent where the build has not all three.
#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BITSMITH_HAS_AVX2 1

#include <immintrin.h>

#include <cstdint>

namespace bitsmith {

struct Avx2Vector8 {
  __m256 value;

  static Avx2Vector8 set(float value) { return {_mm256_set1_ps(value)}; }
  static Avx2Vector8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, value); }
  // Keeps the value in a register: without it, a compiler repeats a shared load in every product.
  Avx2Vector8& pin() {
    __asm__("" : "+x"(value));
    return *this;
  }

  static Avx2Vector8 even_bf16(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
  }
  static Avx2Vector8 odd_bf16(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static Avx2Vector8 load_bf16(const uint16_t* p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
  }
  static Avx2Vector8 load_e4m3(const uint8_t* p) {
    // Bytes with their sign extended, shifted to where a half has its exponent's lower four bits and its
    // mantissa's upper three; the sign's copy in the top exponent bit is cleared.
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
    return {_mm256_cvtph_ps(half)};
  }
  static Avx2Vector8 from_int8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
  }
  static Avx2Vector8 from_int32(const int32_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  template <int place>
  static Avx2Vector8 nibble(const uint8_t* words) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w, 4 * place), _mm256_set1_epi32(15)))};
  }
  template <int place>
  static Avx2Vector8 signed_byte(const uint8_t* words) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * place), 24))};
  }

  static void store_sums(Avx2Vector8 a, Avx2Vector8 b, Avx2Vector8 c, Avx2Vector8 d, float* p) {
    const __m256 ab =
        _mm256_add_ps(_mm256_unpacklo_ps(a.value, b.value), _mm256_unpackhi_ps(a.value, b.value));
    const __m256 cd =
        _mm256_add_ps(_mm256_unpacklo_ps(c.value, d.value), _mm256_unpackhi_ps(c.value, d.value));
    const __m256 halves = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
  __m128i to_int16() const {
    const __m256i whole = _mm256_cvtps_epi32(value);
    return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  }
  void store_int8(int8_t* p) const {
    const __m128i words = to_int16();
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  void store_int16_swapped(int16_t* p) const {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(to_int16(), order));
  }

  friend Avx2Vector8 operator+(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_add_ps(a.value, b.value)}; }
  friend Avx2Vector8 operator-(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_sub_ps(a.value, b.value)}; }
  friend Avx2Vector8 operator*(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_mul_ps(a.value, b.value)}; }
  friend Avx2Vector8 operator/(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_div_ps(a.value, b.value)}; }
  static Avx2Vector8 fma(Avx2Vector8 a, Avx2Vector8 b, Avx2Vector8 c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
  static Avx2Vector8 max(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_max_ps(a.value, b.value)}; }
  static Avx2Vector8 min(Avx2Vector8 a, Avx2Vector8 b) { return {_mm256_min_ps(a.value, b.value)}; }
  Avx2Vector8 abs() const { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), value)}; }
  Avx2Vector8 with_sign_of(Avx2Vector8 other) const {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(sign, value), _mm256_and_ps(sign, other.value))};
  }
  Avx2Vector8 round() const {
    return {_mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  Avx2Vector8 power_of_two() const {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(value), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
  }
  Avx2Vector8 zero_below(Avx2Vector8 x, float limit) const {
    return {_mm256_and_ps(value, _mm256_cmp_ps(x.value, _mm256_set1_ps(limit), _CMP_GE_OQ))};
  }
};

}  // namespace bitsmith

#endif

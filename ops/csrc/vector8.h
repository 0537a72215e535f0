// Eight floats at a time, twice: in plain C++ and in AVX2. Kernels are templates over one of these two,
// so both forms do the same operations in the same order and agree bit for bit.
//
// Knows nothing of tensors, layouts or threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BITSMITH_HAS_AVX2 1
#include <immintrin.h>
#endif

namespace bitsmith {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Coefficients of exp(r) on |r| <= ln(2) / 2 (Taylor, relative error below 2e-7 there), and the range in
// which the result is neither subnormal nor infinite.
constexpr float kExpCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693145751953125f;
constexpr float kLn2Low = 1.42860682030941723e-6f;
constexpr float kExpLowest = -87.0f;
constexpr float kExpHighest = 88.0f;

// An e4m3 byte placed in the exponent and mantissa of a half is the value times this (biases 7 and 15).
constexpr float kE4m3AsHalf = 1.0f / 256;

struct PortableVector8 {
  float lane[8];

  static PortableVector8 set(float value) {
    PortableVector8 r;
    for (float& l : r.lane) l = value;
    return r;
  }
  static PortableVector8 load(const float* p) {
    PortableVector8 r;
    std::memcpy(r.lane, p, sizeof(r.lane));
    return r;
  }
  void store(float* p) const { std::memcpy(p, lane, sizeof(lane)); }
  PortableVector8& pin() { return *this; }

  // Of 16 bf16, those at even or at odd places.
  static PortableVector8 even_bf16(const uint16_t* p) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = bits_to_float(static_cast<uint32_t>(p[2 * i]) << 16);
    return r;
  }
  static PortableVector8 odd_bf16(const uint16_t* p) { return even_bf16(p + 1); }
  static PortableVector8 load_bf16(const uint16_t* p) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = bits_to_float(static_cast<uint32_t>(p[i]) << 16);
    return r;
  }
  // Values times kE4m3AsHalf, exactly.
  static PortableVector8 load_e4m3(const uint8_t* p) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) {
      const uint32_t sign = (p[i] & 0x80u) << 24, exponent = (p[i] >> 3) & 15u, mantissa = p[i] & 7u;
      const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-17f
                                            : bits_to_float(((exponent + 112) << 23) | (mantissa << 20));
      r.lane[i] = bits_to_float(float_to_bits(magnitude) | sign);
    }
    return r;
  }
  static PortableVector8 from_int8(const int8_t* p) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = static_cast<float>(p[i]);
    return r;
  }
  static PortableVector8 from_int32(const int32_t* p) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = static_cast<float>(p[i]);
    return r;
  }
  // Byte or nibble `place` of each of eight 32-bit words, as a number.
  template <int place>
  static PortableVector8 nibble(const uint8_t* words) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) {
      const uint8_t byte = words[4 * i + place / 2];
      r.lane[i] = static_cast<float>(place % 2 == 0 ? byte & 15 : byte >> 4);
    }
    return r;
  }
  template <int place>
  static PortableVector8 signed_byte(const uint8_t* words) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = static_cast<float>(static_cast<int8_t>(words[4 * i + place]));
    return r;
  }

  // Sums of the lanes of four vectors, in the order of `sum`.
  static void store_sums(const PortableVector8& a, const PortableVector8& b, const PortableVector8& c,
                         const PortableVector8& d, float* p) {
    for (const PortableVector8* v : {&a, &b, &c, &d}) *p++ = v->sum();
  }
  float sum() const {
    return ((lane[0] + lane[2]) + (lane[1] + lane[3])) + ((lane[4] + lane[6]) + (lane[5] + lane[7]));
  }
  // Whole numbers of at most 127 in magnitude.
  void store_int8(int8_t* p) const {
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(lane[i]);
  }
  // The same as 16 bits, each four in the order 0 2 1 3.
  void store_int16_swapped(int16_t* p) const {
    constexpr int kOrder[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int16_t>(lane[kOrder[i]]);
  }

  friend PortableVector8 operator+(PortableVector8 a, const PortableVector8& b) {
    for (int i = 0; i < 8; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  friend PortableVector8 operator-(PortableVector8 a, const PortableVector8& b) {
    for (int i = 0; i < 8; ++i) a.lane[i] -= b.lane[i];
    return a;
  }
  friend PortableVector8 operator*(PortableVector8 a, const PortableVector8& b) {
    for (int i = 0; i < 8; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  friend PortableVector8 operator/(PortableVector8 a, const PortableVector8& b) {
    for (int i = 0; i < 8; ++i) a.lane[i] /= b.lane[i];
    return a;
  }
  static PortableVector8 fma(const PortableVector8& a, const PortableVector8& b, const PortableVector8& c) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return r;
  }
  static PortableVector8 max(const PortableVector8& a, const PortableVector8& b) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
  }
  static PortableVector8 min(const PortableVector8& a, const PortableVector8& b) {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
  }
  PortableVector8 abs() const {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = std::fabs(lane[i]);
    return r;
  }
  PortableVector8 with_sign_of(const PortableVector8& other) const {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = std::copysign(lane[i], other.lane[i]);
    return r;
  }
  PortableVector8 round() const {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = std::nearbyint(lane[i]);
    return r;
  }
  // 2^n for whole n in the normal range.
  PortableVector8 power_of_two() const {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) {
      r.lane[i] = bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(lane[i]) + 127) << 23);
    }
    return r;
  }
  // This where x >= limit, 0 elsewhere.
  PortableVector8 zero_below(const PortableVector8& x, float limit) const {
    PortableVector8 r;
    for (int i = 0; i < 8; ++i) r.lane[i] = x.lane[i] >= limit ? lane[i] : 0.0f;
    return r;
  }
};

#ifdef BITSMITH_HAS_AVX2
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
    // Byte to the upper half of 16 bits, arithmetic shift by one: sign, sign, exponent, mantissa; the
    // second copy of the sign is the half's top exponent bit, which is cleared.
    const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<short>(0xbfff)));
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
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a.value, b.value), _mm256_unpackhi_ps(a.value, b.value));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c.value, d.value), _mm256_unpackhi_ps(c.value, d.value));
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
#endif

// exp(x) to about 2e-7 relative; exactly 0 below kExpLowest, so a masked score of -infinity adds nothing.
template <class V>
inline V exp(V x) {
  const V clamped = V::min(V::max(x, V::set(kExpLowest)), V::set(kExpHighest));
  const V n = (clamped * V::set(kLog2E)).round();
  const V r = V::fma(n, V::set(-kLn2Low), V::fma(n, V::set(-kLn2High), clamped));
  V sum = V::set(kExpCoefficients[0]);
  for (int i = 1; i < 7; ++i) sum = V::fma(sum, r, V::set(kExpCoefficients[i]));
  return (sum * n.power_of_two()).zero_below(x, kExpLowest);
}

// tanh(x) to about 1e-7 absolute.
template <class V>
inline V tanh(V x) {
  const V t = exp<V>(x.abs() * V::set(-2.0f));
  return ((V::set(1.0f) - t) / (V::set(1.0f) + t)).with_sign_of(x);
}

// Sum of the lanes, in the order of `store_sums`.
template <class V>
inline float sum_lanes(const V& v) {
  PortableVector8 lanes;
  v.store(lanes.lane);
  return lanes.sum();
}

template <class V>
inline float max_lanes(const V& v) {
  float l[8];
  v.store(l);
  float m = l[0];
  for (int i = 1; i < 8; ++i) m = l[i] > m ? l[i] : m;
  return m;
}

}  // namespace bitsmith

// Stands before the compiler's <immintrin.h>: the instructions that the forms with VNNI use beyond AVX2, in
// plain C++. Each function does what Intel's Intrinsics Guide writes as the operation of the intrinsic of its
// name.
//
// Names are found here first, because the kernels are in this namespace too.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace bitsmith {

struct __m512i {
  uint32_t dword[16];
};
struct __m512 {
  float lane[16];
};

template <class To, class From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class F>
inline __m512i each_dword(F of_lane) {
  __m512i dst;
  for (int j = 0; j < 16; ++j) dst.dword[j] = of_lane(j);
  return dst;
}

template <class F>
inline __m512 each_float(F of_lane) {
  __m512 dst;
  for (int j = 0; j < 16; ++j) dst.lane[j] = of_lane(j);
  return dst;
}

inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i dst;
  std::memcpy(&dst, p, sizeof(dst));
  return dst;
}
inline __m512i _mm512_set1_epi32(int a) {
  return each_dword([&](int) { return static_cast<uint32_t>(a); });
}
inline __m512i _mm512_set1_epi8(char a) {
  const uint32_t byte = static_cast<uint8_t>(a);
  return each_dword([&](int) { return byte << 24 | byte << 16 | byte << 8 | byte; });
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return each_dword([&](int j) { return a.dword[j] & b.dword[j]; });
}
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) {
  return each_dword([&](int j) { return a.dword[j] ^ b.dword[j]; });
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return each_dword([&](int j) { return a.dword[j] + b.dword[j]; });
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned int imm8) {
  return each_dword([&](int j) { return imm8 > 31 ? 0 : a.dword[j] << imm8; });
}
inline __m512i _mm512_srli_epi16(__m512i a, unsigned int imm8) {
  return each_dword([&](int j) {
    const uint32_t low = imm8 > 15 ? 0 : (a.dword[j] & 0xffffu) >> imm8;
    const uint32_t high = imm8 > 15 ? 0 : (a.dword[j] >> 16) >> imm8;
    return high << 16 | low;
  });
}
// The low 32 bits of the 64-bit product.
inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return each_dword(
      [&](int j) { return static_cast<uint32_t>(static_cast<uint64_t>(a.dword[j]) * b.dword[j]); });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  int8_t byte[16];
  std::memcpy(byte, &a, sizeof(byte));
  return each_dword([&](int j) { return static_cast<uint32_t>(static_cast<int32_t>(byte[j])); });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t word[16];
  std::memcpy(word, &a, sizeof(word));
  return each_dword([&](int j) { return static_cast<uint32_t>(word[j]); });
}

// The upper half is undefined: here it is what no result may hold.
inline __m512i _mm512_castsi256_si512(__m256i a) {
  __m512i dst = _mm512_set1_epi32(0x7fc0dead);
  std::memcpy(&dst, &a, sizeof(a));
  return dst;
}
inline __m512i _mm512_inserti64x4(__m512i a, __m256i b, int imm8) {
  std::memcpy(a.dword + 8 * (imm8 & 1), &b, sizeof(b));
  return a;
}

// src + four products of an unsigned byte of a and a signed byte of b; 32 bits, without saturation.
inline uint32_t dpbusd(uint32_t src, uint32_t a, uint32_t b) {
  for (int i = 0; i < 4; ++i) {
    const int32_t unsigned_byte = static_cast<uint8_t>(a >> 8 * i);
    const int32_t signed_byte = static_cast<int8_t>(static_cast<uint8_t>(b >> 8 * i));
    src += static_cast<uint32_t>(unsigned_byte * signed_byte);
  }
  return src;
}
inline __m512i _mm512_dpbusd_epi32(__m512i src, __m512i a, __m512i b) {
  return each_dword([&](int j) { return dpbusd(src.dword[j], a.dword[j], b.dword[j]); });
}
inline __m256i _mm256_dpbusd_avx_epi32(__m256i src, __m256i a, __m256i b) {
  uint32_t sums[8], unsigned_bytes[8], signed_bytes[8];
  std::memcpy(sums, &src, sizeof(sums));
  std::memcpy(unsigned_bytes, &a, sizeof(unsigned_bytes));
  std::memcpy(signed_bytes, &b, sizeof(signed_bytes));
  for (int j = 0; j < 8; ++j) sums[j] = dpbusd(sums[j], unsigned_bytes[j], signed_bytes[j]);
  return same_bits<__m256i>(sums);
}

inline __m512 _mm512_setzero_ps() {
  return each_float([](int) { return 0.0f; });
}
inline __m512 _mm512_set1_ps(float a) {
  return each_float([&](int) { return a; });
}
inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 dst;
  std::memcpy(&dst, p, sizeof(dst));
  return dst;
}
inline __m512 _mm512_broadcast_f32x8(__m256 a) {
  float lane[8];
  std::memcpy(lane, &a, sizeof(lane));
  return each_float([&](int j) { return lane[j % 8]; });
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return same_bits<__m512>(a); }
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return each_float([&](int j) { return static_cast<float>(static_cast<int32_t>(a.dword[j])); });
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return each_float([&](int j) { return a.lane[j] * b.lane[j]; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return each_float([&](int j) { return std::fma(a.lane[j], b.lane[j], c.lane[j]); });
}
inline __m256 _mm512_castps512_ps256(__m512 a) { return _mm256_loadu_ps(a.lane); }
inline __m256 _mm512_extractf32x8_ps(__m512 a, int imm8) { return _mm256_loadu_ps(a.lane + 8 * (imm8 & 1)); }

}  // namespace bitsmith

// Eight floats in plain C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

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

}  // namespace bitsmith

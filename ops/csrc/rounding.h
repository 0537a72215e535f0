// Rounding to the narrow types that caches and activations are stored in.
// Branch-free, so that a compiler vectorises the loops around them.
#pragma once

#include "vector8.h"

namespace bitsmith {

// To nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

inline float round_to_bf16(float value) { return bits_to_float(static_cast<uint32_t>(to_bf16(value)) << 16); }

// The e4m3 value nearest to a number, ties to even, magnitudes above 448 become 448; NaN stays NaN.
inline float round_to_e4m3(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits & 0x80000000u, whole = bits & 0x7fffffffu;
  const uint32_t magnitude = whole < 0x43e00000u ? whole : 0x43e00000u;  // 448
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
  const uint32_t subnormal = float_to_bits((bits_to_float(magnitude) + 16384.0f) - 16384.0f);
  const uint32_t rounded = magnitude < 0x3c800000u ? subnormal : normal;
  return bits_to_float(whole > 0x7f800000u ? bits : sign | rounded);
}

// To nearest, ties to even, saturating: magnitudes above 448, infinity and NaN become 448, so that no byte
// written is a NaN.
inline uint8_t to_e4m3(float value) {
  const uint32_t bits = float_to_bits(value);
  uint32_t magnitude = bits & 0x7fffffffu;
  magnitude = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  // Normal: keep 3 bits of mantissa, exponent bias 127 -> 7.
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6: multiples of 2^-9, rounded by adding a number whose last place is 2^-9.
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 16384.0f) - float_to_bits(16384.0f);
  const uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  return static_cast<uint8_t>(((bits >> 24) & 0x80u) | code);
}

// To nearest, ties to even, saturating at 127 in magnitude (-128 is never written); NaN becomes 127.
inline int8_t to_int8(float value) {
  const float high = value < 127.0f ? value : 127.0f;
  const float clamped = high > -127.0f ? high : -127.0f;
  // 3 * 2^22, whose last place is 1: after the addition the low byte of the bits is the integer.
  return static_cast<int8_t>(static_cast<uint8_t>(float_to_bits(clamped + 12582912.0f)));
}

}  // namespace bitsmith

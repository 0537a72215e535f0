// Exact integer dot products of one group: 16 output rows by a few tokens. Any order gives the same sum.
#pragma once

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

template <class V>
struct IntegerDot {
  // dot[t][row] = sum over the group of stored weight * activation; 4-bit weights count as stored, q + 8.
  template <int num_bits, int num_tokens>
  static void group(const QuantizedLinear& p, const uint8_t* w, int64_t token, int64_t group,
                    int32_t (&dot)[num_tokens][kRowBlock]) {
    constexpr int64_t kInputs = 32 / num_bits;
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t start = (token + t) * p.in_features + group * p.group_size;
      for (int r = 0; r < kRowBlock; ++r) dot[t][r] = 0;
      for (int64_t k = 0; k < p.group_size; k += kInputs) {
        const uint8_t* bytes = w + k / kInputs * 64;
        for (int r = 0; r < kRowBlock; ++r) {
          int32_t sum = 0;
          for (int j = 0; j < 4; ++j) {
            const uint8_t byte = bytes[r * 4 + j];
            if constexpr (num_bits == 4) {
              const int8_t* x = p.activations.x_int8 + start + k;
              sum += (byte & 15) * x[j] + (byte >> 4) * x[j + 4];
            } else {
              sum += static_cast<int8_t>(byte) * p.activations.x_int16[start + k + kPairPlace[j]];
            }
          }
          dot[t][r] += sum;
        }
      }
    }
  }

  static constexpr int kPairPlace[4] = {0, 2, 1, 3};  // where input j of four stands in `x_int16`
};

}  // namespace bitsmith

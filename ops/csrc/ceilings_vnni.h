// The loops of `ceilings.h` in the instructions that forms with VNNI add.
#pragma once

#include "ceilings.h"
#include "rows16_avx512.h"

namespace bitsmith {

// Unsigned weights times signed activations as in `linear_quantized_vnni.h`. Returns the operations done.
template <class R>
int64_t multiply_add_int8_vnni(int64_t num_steps) {
  constexpr int kSums = 10;  // independent: an instruction waits four or five cycles for the one before it
  int8_t x[4] = {3, 3, 3, 3};
  auto weights = R::set(0x0f0f0f0f);
  keep(x);
  keep(weights);
  typename R::Integers sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = R::set(i);
  for (int64_t step = 0; step < num_steps; ++step) {
#pragma GCC unroll 10
    for (int i = 0; i < kSums; ++i) sums[i] = R::add_products(sums[i], weights, x);
  }
  for (auto& sum : sums) keep(sum);
  return num_steps * kSums * kRowBlock * 4 * 2;
}

#ifdef BITSMITH_HAS_AVX512_VNNI

// As multiply_add_fp32, in sixteen lanes.
inline int64_t multiply_add_fp32_avx512(int64_t num_steps) {
  __m512 factor = _mm512_set1_ps(0.999f), addend = _mm512_set1_ps(0.001f), sums[kFloatChains];
  keep(factor);
  keep(addend);
  for (int i = 0; i < kFloatChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t step = 0; step < num_steps; ++step) {
#pragma GCC unroll 10
    for (int i = 0; i < kFloatChains; ++i) sums[i] = _mm512_fmadd_ps(sums[i], factor, addend);
  }
  for (__m512& sum : sums) keep(sum);
  return num_steps * kFloatChains * 16 * 2;
}

#endif

}  // namespace bitsmith

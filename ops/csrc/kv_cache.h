// Writing keys and values into the cells of the paged cache.
#pragma once

#include "kernels.h"
#include "rounding.h"

namespace bitsmith {

template <class Stored, class Convert>
inline void write_cells(const CacheWrite& p, int64_t begin, int64_t end, Convert convert) {
  Stored* cache = static_cast<Stored*>(p.cache);
  // Copies, because a store of bytes may change any field as far as the compiler knows.
  const float scale = p.scale;
  const int64_t size = p.head_size;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = p.slot_mapping[t];
    const int64_t block = slot / kBlockTokens, offset = slot % kBlockTokens;
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
      const float* __restrict from = p.source + t * p.token_stride + h * p.head_stride;
      Stored* __restrict to = cache + ((block * p.num_kv_heads + h) * kBlockTokens + offset) * size;
      for (int64_t d = 0; d < size; ++d) to[d] = convert(from[d] / scale);
    }
  }
}

inline void write_cache(const CacheWrite& p, int64_t begin, int64_t end) {
  if (p.type == CacheType::kE4m3) {
    write_cells<uint8_t>(p, begin, end, [](float value) { return to_e4m3(value); });
  } else if (p.type == CacheType::kInt8) {
    write_cells<int8_t>(p, begin, end, [](float value) { return to_int8(value); });
  } else if (p.type == CacheType::kBfloat16) {
    write_cells<uint16_t>(p, begin, end, [](float value) { return to_bf16(value); });
  } else {
    write_cells<float>(p, begin, end, [](float value) { return value; });
  }
}

}  // namespace bitsmith

// The two products of attention on a block of 16 positions: queries by keys, weights by values. Cells of the
// cache become fp32 as they are loaded, exactly. An element's order of additions is the same whatever the
// number of queries and whether a block was widened to fp32 before.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

constexpr int64_t cell_bytes(CacheType type) {
  return type == CacheType::kFloat32 ? 4 : type == CacheType::kBfloat16 ? 2 : 1;
}

template <class V, CacheType type>
inline V load_cells(const char* at) {
  if constexpr (type == CacheType::kE4m3) return V::load_e4m3(reinterpret_cast<const uint8_t*>(at));
  if constexpr (type == CacheType::kInt8) return V::from_int8(reinterpret_cast<const int8_t*>(at));
  if constexpr (type == CacheType::kBfloat16) return V::load_bf16(reinterpret_cast<const uint16_t*>(at));
  return V::load(reinterpret_cast<const float*>(at));
}

// Calls f with the type as a constant.
template <class F>
inline void with_type(CacheType type, const F& f) {
  switch (type) {
    case CacheType::kE4m3:
      return f(std::integral_constant<CacheType, CacheType::kE4m3>{});
    case CacheType::kInt8:
      return f(std::integral_constant<CacheType, CacheType::kInt8>{});
    case CacheType::kBfloat16:
      return f(std::integral_constant<CacheType, CacheType::kBfloat16>{});
    case CacheType::kFloat32:
      return f(std::integral_constant<CacheType, CacheType::kFloat32>{});
  }
}

template <class V, CacheType type, int num_queries>
inline void dot_products_of(const float* queries, const char* keys, int64_t padded, float* scores,
                            int64_t score_stride) {
  constexpr int kTokens = 4;
  constexpr int64_t kBytes = cell_bytes(type);
  for (int64_t j = 0; j < kBlockTokens; j += kTokens, keys += kTokens * padded * kBytes) {
    V sum[num_queries][kTokens];
    for (auto& of_query : sum)
      for (V& s : of_query) s = V::set(0.0f);
    for (int64_t d = 0; d < padded; d += 8) {
      V query[num_queries];
      for (int q = 0; q < num_queries; ++q) query[q] = V::load(queries + q * padded + d);
      for (int t = 0; t < kTokens; ++t) {
        V key = load_cells<V, type>(keys + (t * padded + d) * kBytes);
        key.pin();
        for (int q = 0; q < num_queries; ++q) sum[q][t] = V::fma(query[q], key, sum[q][t]);
      }
    }
    for (int q = 0; q < num_queries; ++q) {
      V::store_sums(sum[q][0], sum[q][1], sum[q][2], sum[q][3], scores + q * score_stride + j);
    }
  }
}

// queries: [num_queries, padded], keys: [16, padded] -> scores: [num_queries, 16], rows `score_stride` apart.
template <class V, CacheType type>
inline void dot_products(const float* queries, int64_t num_queries, const char* keys, int64_t padded,
                         float* scores, int64_t score_stride) {
  int64_t q = 0;
  for (; q + 3 <= num_queries; q += 3) {
    dot_products_of<V, type, 3>(queries + q * padded, keys, padded, scores + q * score_stride, score_stride);
  }
  if (num_queries - q == 2)
    dot_products_of<V, type, 2>(queries + q * padded, keys, padded, scores + q * score_stride, score_stride);
  if (num_queries - q == 1)
    dot_products_of<V, type, 1>(queries + q * padded, keys, padded, scores + q * score_stride, score_stride);
}

// Weights of `count` positions for a few queries, and those positions' values.
struct WeightedValues {
  const float* weights;  // [queries, count], rows `weight_stride` apart
  int64_t weight_stride;
  const char* values;  // [count, padded]
  int64_t padded, count;
};

template <class V, CacheType type, int num_queries, int num_vectors>
inline void add_weighted_of(const WeightedValues& p, int64_t query, int64_t d, float* results,
                            int64_t result_stride) {
  const float* weights = p.weights + query * p.weight_stride;
  float* to = results + query * result_stride + d;
  V sum[num_queries][num_vectors];
  for (int q = 0; q < num_queries; ++q)
    for (int v = 0; v < num_vectors; ++v) sum[q][v] = V::load(to + q * result_stride + 8 * v);
  for (int64_t j = 0; j < p.count; ++j) {
    V weight[num_queries];
    for (int q = 0; q < num_queries; ++q) weight[q] = V::set(weights[q * p.weight_stride + j]);
    for (int v = 0; v < num_vectors; ++v) {
      V value = load_cells<V, type>(p.values + (j * p.padded + d + 8 * v) * cell_bytes(type));
      value.pin();
      for (int q = 0; q < num_queries; ++q) sum[q][v] = V::fma(weight[q], value, sum[q][v]);
    }
  }
  for (int q = 0; q < num_queries; ++q)
    for (int v = 0; v < num_vectors; ++v) sum[q][v].store(to + q * result_stride + 8 * v);
}

template <class V, CacheType type, int num_queries>
inline void add_weighted_rows(const WeightedValues& p, int64_t query, float* results, int64_t result_stride) {
  constexpr int kVectors = num_queries == 1 ? 8 : 4;
  int64_t d = 0;
  for (; d + 8 * kVectors <= p.padded; d += 8 * kVectors) {
    add_weighted_of<V, type, num_queries, kVectors>(p, query, d, results, result_stride);
  }
  for (; d < p.padded; d += 8) add_weighted_of<V, type, num_queries, 1>(p, query, d, results, result_stride);
}

// results: [num_queries, padded], rows `result_stride` apart, += weights by values.
template <class V, CacheType type>
inline void add_weighted(const WeightedValues& p, int64_t num_queries, float* results,
                         int64_t result_stride) {
  int64_t q = 0;
  for (; q + 3 <= num_queries; q += 3) add_weighted_rows<V, type, 3>(p, q, results, result_stride);
  if (num_queries - q == 2) add_weighted_rows<V, type, 2>(p, q, results, result_stride);
  if (num_queries - q == 1) add_weighted_rows<V, type, 1>(p, q, results, result_stride);
}

}  // namespace bitsmith

// Attention over the paged cache. A query row's context is cut at absolute positions into segments of 256.
// Inside a segment: all scores, their maximum, their exponentials, then the weighted sum of values, position
// by position. Segments are merged in order. So a row's result depends neither on how many rows a step has
// nor on which thread did which segment.
//
// Rows are taken in tiles that share the loads of K and V. Scores of positions that a row must not see are
// -infinity, whose exponential is exactly 0; such values are not added at all.
#pragma once

#include <algorithm>

#include "attention_tile.h"
#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

struct OfTotals;
struct OfParts;

// total += part, both as (weighted values, maximum, sum).
template <class V>
inline void merge_segment(const float* part, int64_t padded, float* total) {
  if (part[padded] == kNegativeInfinity) return;
  const float max = std::max(part[padded], total[padded]);
  float keep[8], add[8];
  exp<V>(V::set(total[padded] - max)).store(keep);
  exp<V>(V::set(part[padded] - max)).store(add);
  for (int64_t d = 0; d < padded; d += 8) {
    const V scaled = V::load(total + d) * V::set(keep[0]);
    V::fma(V::load(part + d), V::set(add[0]), scaled).store(total + d);
  }
  total[padded] = max;
  total[padded + 1] = total[padded + 1] * keep[0] + part[padded + 1] * add[0];
}

inline void write_row(const PagedAttention& p, const AttentionTile& tile, int64_t query, const float* total,
                      float* output) {
  const int64_t padded = padded_head(p.head_size), num_heads = p.num_heads / p.num_kv_heads;
  const int64_t token = tile.first_token + query / num_heads;
  const int64_t head = tile.kv_head * num_heads + query % num_heads;
  float* to = output + (token * p.num_heads + head) * p.head_size;
  const float factor = p.value_scale * cache_factor(p.type) / total[padded + 1];
  for (int64_t d = 0; d < p.head_size; ++d) to[d] = total[d] * factor;
}

// Totals of a tile's queries: nothing seen yet.
inline float* empty_totals(int64_t num_queries, int64_t head_size) {
  const int64_t floats = attention_result_floats(head_size);
  float* totals = scratch<float, OfTotals>(num_queries * floats);
  std::fill(totals, totals + num_queries * floats, 0.0f);
  for (int64_t q = 0; q < num_queries; ++q) totals[q * floats + padded_head(head_size)] = kNegativeInfinity;
  return totals;
}

template <class V>
inline void merge_part(const PagedAttention& p, int64_t num_queries, const float* part, float* totals) {
  const int64_t floats = attention_result_floats(p.head_size);
  for (int64_t q = 0; q < num_queries; ++q) {
    merge_segment<V>(part + q * floats, padded_head(p.head_size), totals + q * floats);
  }
}

inline void write_rows(const PagedAttention& p, const AttentionTile& tile, int64_t num_queries,
                       const float* totals, float* output) {
  const int64_t floats = attention_result_floats(p.head_size);
  for (int64_t q = 0; q < num_queries; ++q) write_row(p, tile, q, totals + q * floats, output);
}

template <class V>
void attend(const PagedAttention& p, const AttentionTile& tile, float* output) {
  TileAttention<V> attention(p, tile);
  const int64_t num_queries = attention.num_queries();
  float* totals = empty_totals(num_queries, p.head_size);
  float* part = scratch<float, OfParts>(num_queries * attention_result_floats(p.head_size));
  const int64_t last = attention.last_position() / kSegmentTokens;
  for (int64_t s = attention.first_position() / kSegmentTokens; s <= last; ++s) {
    attention.segment(s, part);
    merge_part<V>(p, num_queries, part, totals);
  }
  write_rows(p, tile, num_queries, totals, output);
}

template <class V>
void attend_segment(const PagedAttention& p, const AttentionTile& tile, int64_t segment, float* partial) {
  TileAttention<V>(p, tile).segment(segment, partial);
}

template <class V>
void merge_segments(const PagedAttention& p, const AttentionTile& tile, const float* partials,
                    int64_t num_segments, float* output) {
  const int64_t num_queries = tile.num_rows * (p.num_heads / p.num_kv_heads);
  const int64_t size = num_queries * attention_result_floats(p.head_size);
  float* totals = empty_totals(num_queries, p.head_size);
  for (int64_t s = 0; s < num_segments; ++s) merge_part<V>(p, num_queries, partials + s * size, totals);
  write_rows(p, tile, num_queries, totals, output);
}

}  // namespace bitsmith

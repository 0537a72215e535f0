// Attention over the paged cache. A query row's context is cut at absolute positions into segments of 256.
// Inside a segment: all scores, their maximum, their exponentials, then the weighted sum of values, position
// by position. Segments are merged in order. So a row's result depends neither on how many rows a step has
// nor on which thread did which segment.
//
// Rows are taken in tiles that share the loads of K and V; scores of positions that a row must not see are
// -infinity, whose exponential is exactly 0, and such values are never read.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "vector8.h"

namespace bitsmith {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Positions [begin, end) that a row may see, within [0, position].
struct Visible {
  int64_t begin, end;
};

inline Visible visible(const PagedAttention& p, int64_t position) {
  const int64_t begin = p.sliding_window > 0 ? std::max<int64_t>(0, position + 1 - p.sliding_window) : 0;
  return {begin, position + 1};
}

inline int64_t cell_bytes(CacheType type) {
  return type == CacheType::kE4m3 ? 1 : type == CacheType::kBfloat16 ? 2 : 4;
}

// What a cached e4m3 value is multiplied with after `load_cells`.
inline float cache_factor(CacheType type) { return type == CacheType::kE4m3 ? 1.0f / kE4m3AsHalf : 1.0f; }

template <class V>
inline V load_cells(CacheType type, const char* at) {
  if (type == CacheType::kE4m3) return V::load_e4m3(reinterpret_cast<const uint8_t*>(at));
  if (type == CacheType::kBfloat16) return V::load_bf16(reinterpret_cast<const uint16_t*>(at));
  return V::load(reinterpret_cast<const float*>(at));
}

// Scratch of one thread, grown as needed and kept.
struct AttentionScratch {
  std::vector<float> query, scores, block, result;
};

inline AttentionScratch& attention_scratch() {
  static thread_local AttentionScratch scratch;
  return scratch;
}

template <class V>
class TileAttention {
 public:
  TileAttention(const PagedAttention& p, const AttentionTile& tile)
      : p_(p), tile_(tile), scratch_(attention_scratch()), num_heads_(p.num_heads / p.num_kv_heads),
        num_queries_(tile.num_rows * num_heads_), size_(p.head_size),
        padded_((p.head_size + 7) / 8 * 8) {
    scratch_.query.assign(static_cast<size_t>(num_queries_ * padded_), 0.0f);
    scratch_.scores.resize(static_cast<size_t>(num_queries_ * kSegmentTokens));
    scratch_.block.assign(static_cast<size_t>(kBlockTokens * padded_), 0.0f);
    for (int64_t q = 0; q < num_queries_; ++q) {
      const int64_t token = tile.first_token + q / num_heads_;
      const int64_t head = tile.kv_head * num_heads_ + q % num_heads_;
      const float* from = p.query + token * p.query_token_stride + head * p.query_head_stride;
      std::copy(from, from + size_, scratch_.query.begin() + q * padded_);
    }
  }

  int64_t num_queries() const { return num_queries_; }
  int64_t result_floats() const { return attention_result_floats(size_); }
  Visible row(int64_t q) const { return visible(p_, tile_.first_position + q / num_heads_); }
  int64_t last_position() const { return tile_.first_position + tile_.num_rows - 1; }

  // Each query's share of one segment: `padded` weighted values, maximum, sum.
  void segment(int64_t index, float* results) {
    first_ = index * kSegmentTokens;
    const int64_t begin = std::max(first_, row(0).begin);
    const int64_t end = std::min(first_ + kSegmentTokens, last_position() + 1);
    const int64_t block_begin = begin / kBlockTokens, block_end = (end + kBlockTokens - 1) / kBlockTokens;
    for (int64_t b = block_begin; b < block_end; ++b) score_block(b);
    for (int64_t q = 0; q < num_queries_; ++q) {
      exponentials(q, block_begin, block_end, results + q * result_floats());
    }
    for (int64_t b = block_begin; b < block_end; ++b) add_values(b, results);
  }

 private:
  const char* cells(const void* cache, int64_t block) const {
    const int64_t id = tile_.block_table[block];
    const int64_t cell = (id * p_.num_kv_heads + tile_.kv_head) * kBlockTokens * size_;
    return static_cast<const char*>(cache) + cell * cell_bytes(p_.type);
  }

  float* scores(int64_t q, int64_t position) {
    return scratch_.scores.data() + q * kSegmentTokens + (position - first_);
  }

  // A block of the cache as fp32, [16, padded].
  void widen(const void* cache, int64_t block) {
    const char* from = cells(cache, block);
    const int64_t bytes = cell_bytes(p_.type);
    for (int64_t j = 0; j < kBlockTokens; ++j) {
      float* to = scratch_.block.data() + j * padded_;
      const int64_t whole = size_ / 8 * 8;
      for (int64_t d = 0; d < whole; d += 8) load_cells<V>(p_.type, from + (j * size_ + d) * bytes).store(to + d);
      if (whole < size_) {
        char tail[32] = {};
        std::memcpy(tail, from + (j * size_ + whole) * bytes, static_cast<size_t>((size_ - whole) * bytes));
        load_cells<V>(p_.type, tail).store(to + whole);
      }
    }
  }

  void score_block(int64_t block) {
    widen(p_.key_cache, block);
    const V scale = V::set(p_.score_scale * cache_factor(p_.type));
    for (int64_t q = 0; q < num_queries_; ++q) {
      const float* query = scratch_.query.data() + q * padded_;
      float* to = scores(q, block * kBlockTokens);
      for (int64_t j = 0; j < kBlockTokens; ++j) {
        V sum = V::set(0.0f);
        const float* key = scratch_.block.data() + j * padded_;
        for (int64_t d = 0; d < padded_; d += 8) sum = V::fma(V::load(query + d), V::load(key + d), sum);
        to[j] = sum_lanes(sum);
      }
      for (int64_t j = 0; j < kBlockTokens; j += 8) {
        V score = V::load(to + j) * scale;
        if (p_.soft_cap > 0.0f) score = tanh<V>(score / V::set(p_.soft_cap)) * V::set(p_.soft_cap);
        score.store(to + j);
      }
      const Visible range = row(q);
      for (int64_t j = 0; j < kBlockTokens; ++j) {
        const int64_t position = block * kBlockTokens + j;
        if (position < range.begin || position >= range.end) to[j] = kNegativeInfinity;
      }
    }
  }

  // Scores to exponentials in place; clears the weighted sum and sets maximum and sum.
  void exponentials(int64_t q, int64_t block_begin, int64_t block_end, float* result) {
    float* from = scores(q, block_begin * kBlockTokens);
    const int64_t count = (block_end - block_begin) * kBlockTokens;
    V largest = V::set(kNegativeInfinity);
    for (int64_t j = 0; j < count; j += 8) largest = V::max(V::load(from + j), largest);
    const float max = max_lanes(largest);
    std::fill(result, result + padded_, 0.0f);
    result[padded_] = max;
    result[padded_ + 1] = 0.0f;
    if (max == kNegativeInfinity) return;  // nothing of this segment is visible to the row
    V sum = V::set(0.0f);
    for (int64_t j = 0; j < count; j += 8) {
      const V e = exp<V>(V::load(from + j) - V::set(max));
      e.store(from + j);
      sum = sum + e;
    }
    result[padded_ + 1] = sum_lanes(sum);
  }

  void add_values(int64_t block, float* results) {
    widen(p_.value_cache, block);
    for (int64_t q = 0; q < num_queries_; ++q) {
      const Visible range = row(q);
      const int64_t begin = std::max<int64_t>(0, range.begin - block * kBlockTokens);
      const int64_t end = std::min(kBlockTokens, range.end - block * kBlockTokens);
      const float* weights = scores(q, block * kBlockTokens);
      float* result = results + q * result_floats();
      for (int64_t d = 0; d < padded_; d += 8) {
        V sum = V::load(result + d);
        for (int64_t j = begin; j < end; ++j) {
          sum = V::fma(V::set(weights[j]), V::load(scratch_.block.data() + j * padded_ + d), sum);
        }
        sum.store(result + d);
      }
    }
  }

  const PagedAttention& p_;
  const AttentionTile& tile_;
  AttentionScratch& scratch_;
  const int64_t num_heads_, num_queries_, size_, padded_;
  int64_t first_ = 0;  // first position of the segment at hand
};

// total += part, both as (weighted values, maximum, sum).
template <class V>
inline void merge_segment(const float* part, int64_t padded, float* total) {
  const float max = std::max(part[padded], total[padded]);
  if (part[padded] == kNegativeInfinity) return;
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

template <class V>
inline void write_row(const PagedAttention& p, const float* total, int64_t padded, float* output) {
  const float factor = p.value_scale * cache_factor(p.type) / total[padded + 1];
  for (int64_t d = 0; d < p.head_size; ++d) output[d] = total[d] * factor;
}

inline float* output_row(const PagedAttention& p, const AttentionTile& tile, int64_t q, float* output) {
  const int64_t num_heads = p.num_heads / p.num_kv_heads;
  const int64_t token = tile.first_token + q / num_heads;
  return output + (token * p.num_heads + tile.kv_head * num_heads + q % num_heads) * p.head_size;
}

inline void clear_totals(std::vector<float>& totals, int64_t num_queries, int64_t result_floats) {
  totals.assign(static_cast<size_t>(num_queries * result_floats), 0.0f);
  for (int64_t q = 0; q < num_queries; ++q) {
    totals[static_cast<size_t>((q + 1) * result_floats - 2)] = kNegativeInfinity;
  }
}

template <class V>
void attend(const PagedAttention& p, const AttentionTile& tile, float* output) {
  TileAttention<V> attention(p, tile);
  const int64_t floats = attention.result_floats(), num_queries = attention.num_queries();
  static thread_local std::vector<float> totals, parts;
  clear_totals(totals, num_queries, floats);
  parts.resize(static_cast<size_t>(num_queries * floats));
  const int64_t last = attention.last_position() / kSegmentTokens;
  for (int64_t s = attention.row(0).begin / kSegmentTokens; s <= last; ++s) {
    attention.segment(s, parts.data());
    for (int64_t q = 0; q < num_queries; ++q) {
      merge_segment<V>(parts.data() + q * floats, floats - 2, totals.data() + q * floats);
    }
  }
  for (int64_t q = 0; q < num_queries; ++q) {
    write_row<V>(p, totals.data() + q * floats, floats - 2, output_row(p, tile, q, output));
  }
}

template <class V>
void attend_segment(const PagedAttention& p, const AttentionTile& tile, int64_t segment, float* partial) {
  TileAttention<V>(p, tile).segment(segment, partial);
}

template <class V>
void merge_segments(const PagedAttention& p, const AttentionTile& tile, const float* partials,
                    int64_t num_segments, float* output) {
  const int64_t floats = attention_result_floats(p.head_size);
  const int64_t num_queries = tile.num_rows * (p.num_heads / p.num_kv_heads);
  static thread_local std::vector<float> totals;
  clear_totals(totals, num_queries, floats);
  for (int64_t s = 0; s < num_segments; ++s) {
    for (int64_t q = 0; q < num_queries; ++q) {
      merge_segment<V>(partials + (s * num_queries + q) * floats, floats - 2, totals.data() + q * floats);
    }
  }
  for (int64_t q = 0; q < num_queries; ++q) {
    write_row<V>(p, totals.data() + q * floats, floats - 2, output_row(p, tile, q, output));
  }
}

}  // namespace bitsmith

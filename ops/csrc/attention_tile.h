// One tile of query rows against one segment of context: scores, exponentials, weighted values.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_products.h"
#include "kernels.h"
#include "scratch.h"
#include "vector8.h"

namespace bitsmith {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Positions [begin, end) that a row may see.
struct Visible {
  int64_t begin, end;
};

// What a value is multiplied with after `widen`.
inline float cache_factor(CacheType type) { return type == CacheType::kE4m3 ? 1.0f / kE4m3AsHalf : 1.0f; }

// A block of the cache as fp32, [16, padded]; the places between `size` and `padded` become 0.
template <class V, CacheType type>
void widen(const char* from, int64_t size, int64_t padded, float* to) {
  constexpr int64_t bytes = cell_bytes(type);
  const int64_t whole = size / 8 * 8;
  for (int64_t j = 0; j < kBlockTokens; ++j, from += size * bytes, to += padded) {
    for (int64_t d = 0; d < whole; d += 8) load_cells<V, type>(from + d * bytes).store(to + d);
    if (whole < size) {
      char tail[32] = {};
      std::memcpy(tail, from + whole * bytes, static_cast<size_t>((size - whole) * bytes));
      load_cells<V, type>(tail).store(to + whole);
    }
  }
}

// One head of a cache block, as stored or widened: [16, padded].
struct HeadBlock {
  const char* cells;
  CacheType type;
};

struct OfQueries;
struct OfScores;
struct OfBlock;

// Queries are numbered row by row, the heads of a KV head side by side.
template <class V>
class TileAttention {
 public:
  TileAttention(const PagedAttention& p, const AttentionTile& tile)
      : p_(p),
        tile_(tile),
        num_heads_(p.num_heads / p.num_kv_heads),
        num_queries_(tile.num_rows * num_heads_),
        padded_(padded_head(p.head_size)),
        floats_(attention_result_floats(p.head_size)),
        queries_(scratch<float, OfQueries>(num_queries_ * padded_)),
        scores_(scratch<float, OfScores>(num_queries_ * kSegmentTokens)),
        block_(scratch<float, OfBlock>(kBlockTokens * padded_)) {
    for (int64_t q = 0; q < num_queries_; ++q) {
      const int64_t token = tile.first_token + q / num_heads_;
      const int64_t head = tile.kv_head * num_heads_ + q % num_heads_;
      const float* from = p.query + token * p.query_token_stride + head * p.query_head_stride;
      float* to = queries_ + q * padded_;
      std::copy(from, from + p.head_size, to);
      std::fill(to + p.head_size, to + padded_, 0.0f);
    }
  }

  int64_t num_queries() const { return num_queries_; }
  int64_t first_position() const { return visible(0).begin; }
  int64_t last_position() const { return tile_.first_position + tile_.num_rows - 1; }

  // Each query's share of one segment into `results`: weighted values, maximum, sum.
  void segment(int64_t index, float* results) {
    first_ = index * kSegmentTokens;
    const int64_t begin = std::max(first_, first_position());
    const int64_t end = std::min(first_ + kSegmentTokens, last_position() + 1);
    const int64_t block_begin = begin / kBlockTokens, block_end = (end + kBlockTokens - 1) / kBlockTokens;
    // Blocks lie anywhere in the cache, where the hardware's own prefetch does not find them.
    for (int64_t b = block_begin; b < block_end; ++b) {
      const int64_t ahead = b + kBlocksAhead;
      if (ahead < block_end) {
        ask_for(p_.key_cache, ahead);
      } else if (ahead - block_end + block_begin < block_end) {
        ask_for(p_.value_cache, ahead - block_end + block_begin);
      }
      score_block(b);
    }
    for (int64_t q = 0; q < num_queries_; ++q) {
      exponentials(q, block_begin, block_end, results + q * floats_);
    }
    for (int64_t b = block_begin; b < block_end; ++b) {
      if (b + kBlocksAhead < block_end) ask_for(p_.value_cache, b + kBlocksAhead);
      add_values(b, results);
    }
  }

 private:
  static constexpr int64_t kFewQueries = 6, kBlocksAhead = 2;

  Visible visible(int64_t row) const {
    const int64_t position = tile_.first_position + row;
    const int64_t begin = p_.sliding_window > 0 ? std::max<int64_t>(0, position + 1 - p_.sliding_window) : 0;
    return {begin, position + 1};
  }

  float* scores(int64_t query, int64_t position) const {
    return scores_ + query * kSegmentTokens + position - first_;
  }

  const char* cells_of(const void* cache, int64_t block) const {
    const int64_t cell =
        (tile_.block_table[block] * p_.num_kv_heads + tile_.kv_head) * kBlockTokens * p_.head_size;
    return static_cast<const char*>(cache) + cell * cell_bytes(p_.type);
  }

  void ask_for(const void* cache, int64_t block) const {
    const char* from = cells_of(cache, block);
    const int64_t bytes = kBlockTokens * p_.head_size * cell_bytes(p_.type);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  }

  // Few queries read cells as they are stored; for many a block is widened once.
  HeadBlock head_block(const void* cache, int64_t block) const {
    const char* from = cells_of(cache, block);
    const bool is_worth_widening = num_queries_ > kFewQueries && p_.type != CacheType::kFloat32;
    if (padded_ == p_.head_size && !is_worth_widening) return {from, p_.type};
    with_type(p_.type, [&](auto type) { widen<V, type>(from, p_.head_size, padded_, block_); });
    return {reinterpret_cast<const char*>(block_), CacheType::kFloat32};
  }

  void score_block(int64_t block) {
    const HeadBlock keys = head_block(p_.key_cache, block);
    const int64_t position = block * kBlockTokens;
    const V scale = V::set(p_.score_scale * cache_factor(p_.type));
    with_type(keys.type, [&](auto type) {
      dot_products<V, type>(queries_, num_queries_, keys.cells, padded_, scores(0, position), kSegmentTokens);
    });
    for (int64_t q = 0; q < num_queries_; ++q) {
      float* to = scores(q, position);
      for (int64_t j = 0; j < kBlockTokens; j += 8) {
        V score = V::load(to + j) * scale;
        if (p_.soft_cap > 0.0f) score = tanh<V>(score / V::set(p_.soft_cap)) * V::set(p_.soft_cap);
        score.store(to + j);
      }
      const Visible range = visible(q / num_heads_);
      std::fill(to, to + std::clamp<int64_t>(range.begin - position, 0, kBlockTokens), kNegativeInfinity);
      std::fill(to + std::clamp<int64_t>(range.end - position, 0, kBlockTokens), to + kBlockTokens,
                kNegativeInfinity);
    }
  }

  // Scores to exponentials in place; clears the weighted values, sets maximum and sum.
  void exponentials(int64_t query, int64_t block_begin, int64_t block_end, float* result) const {
    float* from = scores(query, block_begin * kBlockTokens);
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
    const HeadBlock values = head_block(p_.value_cache, block);
    const int64_t position = block * kBlockTokens;
    for (int64_t row = 0; row < tile_.num_rows; ++row) {
      const Visible range = visible(row);
      const int64_t begin = std::clamp<int64_t>(range.begin - position, 0, kBlockTokens);
      const int64_t end = std::clamp<int64_t>(range.end - position, 0, kBlockTokens);
      const int64_t query = row * num_heads_;
      with_type(values.type, [&](auto type) {
        const char* cells = values.cells + begin * padded_ * cell_bytes(type);
        add_weighted<V, type>({scores(query, position) + begin, kSegmentTokens, cells, padded_, end - begin},
                              num_heads_, results + query * floats_, floats_);
      });
    }
  }

  const PagedAttention& p_;
  const AttentionTile& tile_;
  const int64_t num_heads_, num_queries_, padded_, floats_;
  float* const queries_;  // [num_queries, padded]
  float* const scores_;   // [num_queries, 256]
  float* const block_;    // [16, padded]
  int64_t first_ = 0;     // first position of the segment at hand
};

}  // namespace bitsmith

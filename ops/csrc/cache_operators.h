// The operators on the paged cache: checks of every argument, tiles, threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "forms.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace bitsmith {

using at::Tensor;

struct OfPartials;

inline CacheType cache_type(const Tensor& key_cache, const Tensor& value_cache, const char* op) {
  TORCH_CHECK_VALUE(key_cache.dim() == 4 && key_cache.size(2) == kBlockTokens, op,
                    ": key_cache must be [num_blocks, num_kv_heads, 16, head_size], got ", key_cache.sizes());
  TORCH_CHECK_VALUE(
      key_cache.sizes() == value_cache.sizes() && key_cache.scalar_type() == value_cache.scalar_type(), op,
      ": key_cache and value_cache must have one shape and dtype, got ", key_cache.sizes(), " ",
      key_cache.scalar_type(), " and ", value_cache.sizes(), " ", value_cache.scalar_type());
  TORCH_CHECK_VALUE(key_cache.is_contiguous() && value_cache.is_contiguous(), op,
                    ": the caches must be contiguous");
  switch (key_cache.scalar_type()) {
    case at::kFloat:
      return CacheType::kFloat32;
    case at::kBFloat16:
      return CacheType::kBfloat16;
    case at::kFloat8_e4m3fn:
      return CacheType::kE4m3;
    case at::kChar:
      return CacheType::kInt8;
    default:
      TORCH_CHECK_VALUE(false, op, ": the caches must be float32, bfloat16, float8_e4m3fn or int8, got ",
                        key_cache.scalar_type());
  }
}

inline Tensor heads_of(const Tensor& t, const char* name, const char* op) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat && t.dim() == 3, op, ": ", name,
                    " must be float32 [num_tokens, heads, head_size], got ", t.scalar_type(), " ", t.sizes());
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

inline void write_kv_cache(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
                           const Tensor& slot_mapping, double key_scale, double value_scale) {
  const char* op = "bitsmith::write_kv_cache";
  const CacheType type = cache_type(key_cache, value_cache, op);
  TORCH_CHECK_VALUE(key_scale > 0 && value_scale > 0, op, ": scales must be positive, got ", key_scale,
                    " and ", value_scale);
  TORCH_CHECK_VALUE(
      slot_mapping.scalar_type() == at::kLong && slot_mapping.dim() == 1 && slot_mapping.is_contiguous(), op,
      ": slot_mapping must be contiguous int64 [num_tokens], got ", slot_mapping.scalar_type(), " ",
      slot_mapping.sizes());
  const int64_t num_tokens = slot_mapping.size(0), num_kv_heads = key_cache.size(1),
                head_size = key_cache.size(3);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK_INDEX(slots[t] >= 0 && slots[t] < key_cache.size(0) * kBlockTokens, op, ": slot ", slots[t],
                      " of token ", t, " is outside the cache of ", key_cache.size(0), " blocks");
  }
  const Tensor sources[2] = {heads_of(key, "key", op), heads_of(value, "value", op)};
  CacheWrite writes[2];
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK_VALUE(sources[i].size(0) == num_tokens && sources[i].size(1) == num_kv_heads &&
                          sources[i].size(2) == head_size,
                      op, ": ", i == 0 ? "key" : "value", " is ", sources[i].sizes(),
                      ", the cache and slot_mapping need [", num_tokens, ", ", num_kv_heads, ", ", head_size,
                      "]");
    writes[i] = {sources[i].const_data_ptr<float>(),
                 (i == 0 ? key_cache : value_cache).mutable_data_ptr(),
                 slots,
                 sources[i].stride(0),
                 sources[i].stride(1),
                 num_kv_heads,
                 head_size,
                 static_cast<float>(i == 0 ? key_scale : value_scale),
                 type};
  }
  for_each(num_tokens, num_kv_heads * head_size * 16, kAnyPart, [&](int64_t begin, int64_t end) {
    for (const CacheWrite& write : writes) kernels().write_cache(write, begin, end);
  });
}

inline void check_batch(const Tensor& block_table, const Tensor& query_start_loc, const Tensor& seq_lens,
                        int64_t num_tokens, int64_t num_blocks, const char* op) {
  for (const auto& [t, name] :
       {std::pair(&block_table, "block_table"), std::pair(&query_start_loc, "query_start_loc"),
        std::pair(&seq_lens, "seq_lens")}) {
    TORCH_CHECK_VALUE(t->scalar_type() == at::kInt && t->is_contiguous(), op, ": ", name,
                      " must be contiguous int32, got ", t->scalar_type(), " ", t->sizes());
  }
  TORCH_CHECK_VALUE(seq_lens.dim() == 1 && block_table.dim() == 2 && query_start_loc.dim() == 1 &&
                        block_table.size(0) == seq_lens.size(0) &&
                        query_start_loc.size(0) == seq_lens.size(0) + 1,
                    op, ": block_table ", block_table.sizes(), ", query_start_loc ", query_start_loc.sizes(),
                    " and seq_lens ", seq_lens.sizes(), " must be [R, max_blocks], [R + 1] and [R]");
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int64_t num_requests = seq_lens.size(0), max_blocks = block_table.size(1);
  TORCH_CHECK_VALUE(starts[0] == 0 && starts[num_requests] == num_tokens, op,
                    ": query_start_loc must go from 0 to the ", num_tokens, " rows of the query, got ",
                    starts[0], " to ", starts[num_requests]);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t rows = starts[r + 1] - starts[r];
    TORCH_CHECK_VALUE(rows >= 0 && lens[r] >= rows, op, ": request ", r, " has ", rows, " rows but seq_len ",
                      lens[r]);
    const int64_t blocks = rows == 0 ? 0 : ceil_div(lens[r], kBlockTokens);
    TORCH_CHECK_INDEX(blocks <= max_blocks, op, ": request ", r, " with seq_len ", lens[r], " needs ", blocks,
                      " blocks, block_table has ", max_blocks);
    const int32_t* ids = block_table.const_data_ptr<int32_t>() + r * max_blocks;
    for (int64_t b = 0; b < blocks; ++b) {
      TORCH_CHECK_INDEX(ids[b] >= 0 && ids[b] < num_blocks, op, ": block id ", ids[b], " of request ", r,
                        " is outside the cache of ", num_blocks, " blocks");
    }
  }
}

constexpr int64_t kTileRows = 8;

// Every request's rows in tiles, once for each KV head.
inline std::vector<AttentionTile> make_tiles(const PagedAttention& p, const Tensor& block_table,
                                             const Tensor& query_start_loc, const Tensor& seq_lens) {
  std::vector<AttentionTile> tiles;
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < seq_lens.size(0); ++r) {
    const int32_t* table = block_table.const_data_ptr<int32_t>() + r * block_table.size(1);
    const int64_t num_computed = lens[r] - (starts[r + 1] - starts[r]);
    for (int64_t t = starts[r]; t < starts[r + 1]; t += kTileRows) {
      const int64_t num_rows = std::min<int64_t>(kTileRows, starts[r + 1] - t);
      for (int64_t h = 0; h < p.num_kv_heads; ++h)
        tiles.push_back({table, t, num_rows, num_computed + t - starts[r], h});
    }
  }
  return tiles;
}

struct Segments {
  int64_t tile, begin, end, partials;  // segments [begin, end) of a tile; where its partials start
};

inline int64_t first_segment(const PagedAttention& p, const AttentionTile& tile) {
  const int64_t begin = p.sliding_window > 0 ? tile.first_position + 1 - p.sliding_window : 0;
  return std::max<int64_t>(0, begin) / kSegmentTokens;
}

// Products of all the tiles together, roughly.
inline int64_t num_products(const PagedAttention& p, const std::vector<AttentionTile>& tiles) {
  int64_t positions = 0;
  for (const AttentionTile& tile : tiles) {
    const int64_t seen = tile.first_position + tile.num_rows;
    positions +=
        tile.num_rows * (p.sliding_window > 0 ? std::min(seen, p.sliding_window + tile.num_rows) : seen);
  }
  return positions * (p.num_heads / p.num_kv_heads) * p.head_size * 2;
}

// Few tiles with long contexts: segments of one tile go to different threads.
inline void attend_split(const PagedAttention& p, const std::vector<AttentionTile>& tiles, float* output) {
  std::vector<Segments> plan;
  std::vector<std::pair<int64_t, int64_t>> units;  // (tile, segment)
  int64_t floats = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const AttentionTile& tile = tiles[i];
    const int64_t begin = first_segment(p, tile);
    const int64_t end = (tile.first_position + tile.num_rows - 1) / kSegmentTokens + 1;
    plan.push_back({static_cast<int64_t>(i), begin, end, floats});
    for (int64_t s = begin; s < end; ++s) units.emplace_back(static_cast<int64_t>(i), s);
    floats +=
        (end - begin) * tile.num_rows * (p.num_heads / p.num_kv_heads) * attention_result_floats(p.head_size);
  }
  float* partials = scratch<float, OfPartials>(floats);
  const auto num_units = static_cast<int64_t>(units.size());
  for_each(num_units, num_products(p, tiles) / 2 / std::max<int64_t>(num_units, 1), 1,
           [&](int64_t begin, int64_t end) {
             for (int64_t u = begin; u < end; ++u) {
               const auto [index, segment] = units[static_cast<size_t>(u)];
               const AttentionTile& tile = tiles[static_cast<size_t>(index)];
               const Segments& of_tile = plan[static_cast<size_t>(index)];
               const int64_t size =
                   tile.num_rows * (p.num_heads / p.num_kv_heads) * attention_result_floats(p.head_size);
               kernels().attend_segment(p, tile, segment,
                                        partials + of_tile.partials + (segment - of_tile.begin) * size);
             }
           });
  for (const Segments& s : plan) {
    kernels().merge_segments(p, tiles[static_cast<size_t>(s.tile)], partials + s.partials, s.end - s.begin,
                             output);
  }
}

inline Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                              const Tensor& block_table, const Tensor& query_start_loc,
                              const Tensor& seq_lens, double softmax_scale, double key_scale,
                              double value_scale, int64_t sliding_window, double soft_cap) {
  const char* op = "bitsmith::paged_attention";
  PagedAttention p{};
  p.type = cache_type(key_cache, value_cache, op);
  const Tensor q = heads_of(query, "query", op);
  p.num_heads = q.size(1);
  p.num_kv_heads = key_cache.size(1);
  p.head_size = key_cache.size(3);
  TORCH_CHECK_VALUE(q.size(2) == p.head_size && p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0, op,
                    ": query ", q.sizes(), " does not fit a cache of ", p.num_kv_heads, " heads of size ",
                    p.head_size);
  TORCH_CHECK_VALUE(sliding_window >= 0 && soft_cap >= 0, op,
                    ": sliding_window and soft_cap must not be negative, got ", sliding_window, " and ",
                    soft_cap);
  check_batch(block_table, query_start_loc, seq_lens, q.size(0), key_cache.size(0), op);
  p.query = q.const_data_ptr<float>();
  p.key_cache = key_cache.const_data_ptr();
  p.value_cache = value_cache.const_data_ptr();
  p.query_token_stride = q.stride(0);
  p.query_head_stride = q.stride(1);
  p.score_scale = static_cast<float>(softmax_scale * key_scale);
  p.value_scale = static_cast<float>(value_scale);
  p.sliding_window = sliding_window;
  p.soft_cap = static_cast<float>(soft_cap);
  Tensor output = at::empty(q.sizes(), q.options());
  float* to = output.mutable_data_ptr<float>();
  const std::vector<AttentionTile> tiles = make_tiles(p, block_table, query_start_loc, seq_lens);
  const auto num_tiles = static_cast<int64_t>(tiles.size());
  if (num_tiles < 8 * num_threads()) {
    attend_split(p, tiles, to);
  } else {
    for_each(num_tiles, num_products(p, tiles) / 2 / num_tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernels().attend(p, tiles[static_cast<size_t>(i)], to);
    });
  }
  return output;
}

}  // namespace bitsmith

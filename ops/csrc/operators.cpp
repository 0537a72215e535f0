// The operators as torch sees them: schemas, checks of every argument, threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace bitsmith {
namespace {

using at::Tensor;

std::atomic<const Kernels*> active_kernels{nullptr};

const Kernels& kernels() {
  const Kernels* active = active_kernels.load(std::memory_order_relaxed);
  if (active == nullptr) {
    active = avx2_kernels() != nullptr ? avx2_kernels() : portable_kernels();
    active_kernels.store(active, std::memory_order_relaxed);
  }
  return *active;
}

void select_form(c10::string_view name) {
  for (const Kernels* form : {portable_kernels(), avx2_kernels()}) {
    if (form != nullptr && name == form->name) {
      active_kernels.store(form);
      return;
    }
  }
  TORCH_CHECK_VALUE(false, "bitsmith::select_form: this build has no form \"", name, "\"");
}

std::string active_form() { return kernels().name; }

// Runs f(i) for i in [0, count) on torch's threads, each taking the next one that is free.
template <class F>
void for_each(int64_t count, int64_t grain, const F& f) {
  if (count <= grain || at::get_num_threads() == 1) {
    if (count > 0) f(0, count);
    return;
  }
  const int64_t num_workers = std::min<int64_t>(at::get_num_threads(), (count + grain - 1) / grain);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_workers, 1, [&](int64_t, int64_t) {
    while (true) {
      const int64_t begin = next.fetch_add(grain);
      if (begin >= count) return;
      f(begin, std::min(begin + grain, count));
    }
  });
}

Activations activations_mode(int64_t activations, const char* op) {
  TORCH_CHECK_VALUE(activations >= 0 && activations <= 2, op, ": activations must be 0 (fp32), 1 (bf16) or 2 (int8), got ", activations);
  return static_cast<Activations>(activations);
}

Tensor rows_of(const Tensor& x, int64_t in_features, const char* op) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, op, ": x must be float32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [num_tokens, in_features], got ", x.sizes());
  TORCH_CHECK_VALUE(x.size(1) == in_features, op, ": x has ", x.size(1), " columns, the weight ", in_features);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

const float* bias_data(const std::optional<Tensor>& bias, int64_t out_features, const char* op) {
  if (!bias.has_value()) return nullptr;
  TORCH_CHECK_VALUE(bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->dim() == 1 &&
                        bias->size(0) == out_features,
                    op, ": bias must be contiguous float32 [", out_features, "], got ", bias->scalar_type(), " ",
                    bias->sizes());
  return bias->const_data_ptr<float>();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Units of work that are worth a hand-over between threads: about 10 µs of streaming or arithmetic.
int64_t grain_of(int64_t bytes_per_unit, int64_t num_tokens) {
  constexpr int64_t kWorthwhileBytes = 64 << 10;
  return std::max<int64_t>(1, kWorthwhileBytes / (bytes_per_unit * (1 + num_tokens / 4)));
}

struct OfDense;
struct OfQuantized;
struct OfPartials;

Tensor linear_dense(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t activations) {
  const char* op = "bitsmith::linear_dense";
  const Activations mode = activations_mode(activations, op);
  TORCH_CHECK_VALUE(mode != Activations::kInt8, op, ": int8 activations need a quantized weight");
  TORCH_CHECK_VALUE(weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kBFloat16, op,
                    ": weight must be float32 or bfloat16, got ", weight.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.is_contiguous(), op,
                    ": weight must be contiguous [out_features, in_features], got ", weight.sizes());
  const Tensor rows = rows_of(x, weight.size(1), op);
  DenseLinear p{};
  p.weight = weight.const_data_ptr();
  p.bias = bias_data(bias, weight.size(0), op);
  p.num_tokens = rows.size(0);
  p.in_features = weight.size(1);
  p.padded_in = ceil_div(p.in_features, 16) * 16;
  p.out_features = weight.size(0);
  p.is_bf16 = weight.scalar_type() == at::kBFloat16;
  Tensor y = at::empty({p.num_tokens, p.out_features}, x.options());
  p.y = y.mutable_data_ptr<float>();
  float* arranged = scratch<float, OfDense>(p.num_tokens * p.padded_in);
  p.x = arranged;
  const float* source = rows.const_data_ptr<float>();
  const int64_t stride = rows.stride(0);
  for_each(p.num_tokens, grain_of(p.padded_in * 8, 0), [&](int64_t begin, int64_t end) {
    kernels().arrange_dense(p, source, stride, mode == Activations::kBfloat16, arranged, begin, end);
  });
  if (p.num_tokens == 0) return y;
  constexpr int64_t kUnit = 48;  // rows; a multiple of what the tiles hold
  const int64_t grain = grain_of(kUnit * p.in_features * (p.is_bf16 ? 2 : 4), p.num_tokens);
  for_each(ceil_div(p.out_features, kUnit), grain, [&](int64_t begin, int64_t end) {
    kernels().linear_dense(p, begin * kUnit, std::min(end * kUnit, p.out_features));
  });
  return y;
}

void check_packed(const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& zero_point,
                  const QuantizedLinear& p, const char* op) {
  TORCH_CHECK_VALUE(p.num_bits == 4 || p.num_bits == 8, op, ": num_bits must be 4 or 8, got ", p.num_bits);
  TORCH_CHECK_VALUE(p.in_features > 0 && p.out_features > 0, op, ": in_features ", p.in_features,
                    " and out_features ", p.out_features, " must be positive");
  TORCH_CHECK_VALUE(p.group_size > 0 && p.group_size % 8 == 0 && p.in_features % p.group_size == 0, op,
                    ": group_size ", p.group_size, " must be a multiple of 8 that divides in_features ",
                    p.in_features);
  TORCH_CHECK_VALUE(p.group_size <= 65536, op, ": group_size ", p.group_size, " is above 65536");
  const int64_t blocks = ceil_div(p.out_features, kRowBlock);
  TORCH_CHECK_VALUE((weight.scalar_type() == at::kByte || weight.scalar_type() == at::kChar) &&
                        weight.is_contiguous() && weight.numel() == blocks * kRowBlock * p.in_features * p.num_bits / 8,
                    op, ": packed weight must be contiguous uint8 or int8 with ",
                    blocks * kRowBlock * p.in_features * p.num_bits / 8, " bytes, got ", weight.scalar_type(), " ",
                    weight.sizes());
  const int64_t needed = blocks * p.num_groups * kRowBlock;
  TORCH_CHECK_VALUE((scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kBFloat16) &&
                        scale.is_contiguous() && scale.numel() >= needed,
                    op, ": packed scale must be contiguous float32 or bfloat16 with at least ", needed,
                    " elements, got ", scale.scalar_type(), " ", scale.sizes());
  if (zero_point.has_value()) {
    TORCH_CHECK_VALUE(zero_point->scalar_type() == at::kChar && zero_point->is_contiguous() &&
                          zero_point->numel() >= needed,
                      op, ": packed zero_point must be contiguous int8 with at least ", needed, " elements, got ",
                      zero_point->scalar_type(), " ", zero_point->sizes());
  }
}

void assign_scratch(QuantizedLinear& p) {
  const int64_t inputs = p.num_tokens * p.in_features;
  if (!p.is_int8) {
    p.activations.x = scratch<float, OfQuantized>(inputs);
    return;
  }
  if (p.num_bits == 4) {
    p.activations.x_int8 = scratch<int8_t, OfQuantized>(inputs);
  } else {
    p.activations.x_int16 = scratch<int16_t, OfQuantized>(inputs);
  }
  p.activations.scale = scratch<float, OfQuantized>(p.num_tokens * p.num_groups);
  p.activations.sum = scratch<int32_t, OfQuantized>(p.num_tokens * p.num_groups);
}

Tensor linear_quantized(const Tensor& x, const Tensor& weight, const Tensor& scale,
                        const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias,
                        int64_t in_features, int64_t out_features, int64_t group_size, int64_t num_bits,
                        int64_t activations) {
  const char* op = "bitsmith::linear_quantized";
  const Activations mode = activations_mode(activations, op);
  QuantizedLinear p{};
  p.in_features = in_features;
  p.out_features = out_features;
  p.group_size = group_size;
  p.num_groups = group_size > 0 ? in_features / group_size : 0;
  p.num_bits = static_cast<int>(num_bits);
  p.is_int8 = mode == Activations::kInt8;
  check_packed(weight, scale, zero_point, p, op);
  const Tensor rows = rows_of(x, in_features, op);
  p.num_tokens = rows.size(0);
  p.weight = static_cast<const uint8_t*>(weight.const_data_ptr());
  p.scale = scale.const_data_ptr();
  p.scale_is_bf16 = scale.scalar_type() == at::kBFloat16;
  p.zero_point = zero_point.has_value() ? zero_point->const_data_ptr<int8_t>() : nullptr;
  p.bias = bias_data(bias, out_features, op);
  Tensor y = at::empty({p.num_tokens, out_features}, x.options());
  p.y = y.mutable_data_ptr<float>();
  assign_scratch(p);
  const float* source = rows.const_data_ptr<float>();
  const int64_t stride = rows.stride(0);
  for_each(p.num_tokens, grain_of(in_features * 8, 0), [&](int64_t begin, int64_t end) {
    kernels().arrange_quantized(p, source, stride, mode == Activations::kBfloat16, begin, end);
  });
  if (p.num_tokens == 0) return y;
  const int64_t grain = grain_of(kRowBlock * in_features * num_bits / 8, p.num_tokens);
  for_each(ceil_div(out_features, kRowBlock), grain, [&](int64_t begin, int64_t end) {
    kernels().linear_quantized(p, begin, end);
  });
  return y;
}

CacheType cache_type(const Tensor& key_cache, const Tensor& value_cache, const char* op) {
  TORCH_CHECK_VALUE(key_cache.dim() == 4 && key_cache.size(2) == kBlockTokens, op,
                    ": key_cache must be [num_blocks, num_kv_heads, 16, head_size], got ", key_cache.sizes());
  TORCH_CHECK_VALUE(key_cache.sizes() == value_cache.sizes() && key_cache.scalar_type() == value_cache.scalar_type(), op,
                    ": key_cache and value_cache must have one shape and dtype, got ", key_cache.sizes(), " ",
                    key_cache.scalar_type(), " and ", value_cache.sizes(), " ", value_cache.scalar_type());
  TORCH_CHECK_VALUE(key_cache.is_contiguous() && value_cache.is_contiguous(), op, ": the caches must be contiguous");
  switch (key_cache.scalar_type()) {
    case at::kFloat: return CacheType::kFloat32;
    case at::kBFloat16: return CacheType::kBfloat16;
    case at::kFloat8_e4m3fn: return CacheType::kE4m3;
    default: TORCH_CHECK_VALUE(false, op, ": the caches must be float32, bfloat16 or float8_e4m3fn, got ", key_cache.scalar_type());
  }
}

Tensor heads_of(const Tensor& t, const char* name, const char* op) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat && t.dim() == 3, op, ": ", name,
                    " must be float32 [num_tokens, heads, head_size], got ", t.scalar_type(), " ", t.sizes());
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

void write_kv_cache(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
                    const Tensor& slot_mapping, double key_scale, double value_scale) {
  const char* op = "bitsmith::write_kv_cache";
  const CacheType type = cache_type(key_cache, value_cache, op);
  TORCH_CHECK_VALUE(key_scale > 0 && value_scale > 0, op, ": scales must be positive, got ", key_scale, " and ", value_scale);
  TORCH_CHECK_VALUE(slot_mapping.scalar_type() == at::kLong && slot_mapping.dim() == 1 && slot_mapping.is_contiguous(), op,
                    ": slot_mapping must be contiguous int64 [num_tokens], got ", slot_mapping.scalar_type(), " ", slot_mapping.sizes());
  const int64_t num_tokens = slot_mapping.size(0), num_kv_heads = key_cache.size(1), head_size = key_cache.size(3);
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK_INDEX(slots[t] >= 0 && slots[t] < key_cache.size(0) * kBlockTokens, op, ": slot ", slots[t], " of token ", t,
                      " is outside the cache of ", key_cache.size(0), " blocks");
  }
  const Tensor sources[2] = {heads_of(key, "key", op), heads_of(value, "value", op)};
  CacheWrite writes[2];
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK_VALUE(sources[i].size(0) == num_tokens && sources[i].size(1) == num_kv_heads && sources[i].size(2) == head_size,
                      op, ": ", i == 0 ? "key" : "value", " is ", sources[i].sizes(), ", the cache and slot_mapping need [",
                      num_tokens, ", ", num_kv_heads, ", ", head_size, "]");
    writes[i] = {sources[i].const_data_ptr<float>(), (i == 0 ? key_cache : value_cache).mutable_data_ptr(), slots,
                 sources[i].stride(0), sources[i].stride(1), num_kv_heads, head_size,
                 static_cast<float>(i == 0 ? key_scale : value_scale), type};
  }
  for_each(num_tokens, grain_of(num_kv_heads * head_size * 16, 0), [&](int64_t begin, int64_t end) {
    for (const CacheWrite& write : writes) kernels().write_cache(write, begin, end);
  });
}

void check_batch(const Tensor& block_table, const Tensor& query_start_loc, const Tensor& seq_lens, int64_t num_tokens,
                 int64_t num_blocks, const char* op) {
  for (const auto& [t, name] : {std::pair(&block_table, "block_table"), std::pair(&query_start_loc, "query_start_loc"),
                                std::pair(&seq_lens, "seq_lens")}) {
    TORCH_CHECK_VALUE(t->scalar_type() == at::kInt && t->is_contiguous(), op, ": ", name, " must be contiguous int32, got ",
                      t->scalar_type(), " ", t->sizes());
  }
  TORCH_CHECK_VALUE(seq_lens.dim() == 1 && block_table.dim() == 2 && query_start_loc.dim() == 1 &&
                        block_table.size(0) == seq_lens.size(0) && query_start_loc.size(0) == seq_lens.size(0) + 1,
                    op, ": block_table ", block_table.sizes(), ", query_start_loc ", query_start_loc.sizes(), " and seq_lens ",
                    seq_lens.sizes(), " must be [R, max_blocks], [R + 1] and [R]");
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int64_t num_requests = seq_lens.size(0), max_blocks = block_table.size(1);
  TORCH_CHECK_VALUE(starts[0] == 0 && starts[num_requests] == num_tokens, op, ": query_start_loc must go from 0 to the ",
                    num_tokens, " rows of the query, got ", starts[0], " to ", starts[num_requests]);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t rows = starts[r + 1] - starts[r];
    TORCH_CHECK_VALUE(rows >= 0 && lens[r] >= rows, op, ": request ", r, " has ", rows, " rows but seq_len ", lens[r]);
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
std::vector<AttentionTile> make_tiles(const PagedAttention& p, const Tensor& block_table, const Tensor& query_start_loc,
                                      const Tensor& seq_lens) {
  std::vector<AttentionTile> tiles;
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  for (int64_t r = 0; r < seq_lens.size(0); ++r) {
    const int32_t* table = block_table.const_data_ptr<int32_t>() + r * block_table.size(1);
    const int64_t num_computed = lens[r] - (starts[r + 1] - starts[r]);
    for (int64_t t = starts[r]; t < starts[r + 1]; t += kTileRows) {
      const int64_t num_rows = std::min<int64_t>(kTileRows, starts[r + 1] - t);
      for (int64_t h = 0; h < p.num_kv_heads; ++h) tiles.push_back({table, t, num_rows, num_computed + t - starts[r], h});
    }
  }
  return tiles;
}

struct Segments {
  int64_t tile, begin, end, partials;  // segments [begin, end) of a tile; where its partials start
};

int64_t first_segment(const PagedAttention& p, const AttentionTile& tile) {
  const int64_t begin = p.sliding_window > 0 ? tile.first_position + 1 - p.sliding_window : 0;
  return std::max<int64_t>(0, begin) / kSegmentTokens;
}

// Whether all the tiles together are too little work to wake other threads for.
bool is_small(const PagedAttention& p, const std::vector<AttentionTile>& tiles) {
  constexpr int64_t kWorthwhileProducts = 200000;
  int64_t positions = 0;
  for (const AttentionTile& tile : tiles) {
    const int64_t seen = tile.first_position + tile.num_rows;
    positions += tile.num_rows * (p.sliding_window > 0 ? std::min(seen, p.sliding_window + tile.num_rows) : seen);
  }
  return positions * (p.num_heads / p.num_kv_heads) * p.head_size * 2 < kWorthwhileProducts;
}

// Few tiles with long contexts: segments of one tile go to different threads.
void attend_split(const PagedAttention& p, const std::vector<AttentionTile>& tiles, float* output) {
  std::vector<Segments> plan;
  std::vector<std::pair<int64_t, int64_t>> units;  // (tile, segment)
  int64_t floats = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const AttentionTile& tile = tiles[i];
    const int64_t begin = first_segment(p, tile);
    const int64_t end = (tile.first_position + tile.num_rows - 1) / kSegmentTokens + 1;
    plan.push_back({static_cast<int64_t>(i), begin, end, floats});
    for (int64_t s = begin; s < end; ++s) units.emplace_back(static_cast<int64_t>(i), s);
    floats += (end - begin) * tile.num_rows * (p.num_heads / p.num_kv_heads) * attention_result_floats(p.head_size);
  }
  float* partials = scratch<float, OfPartials>(floats);
  const auto num_units = static_cast<int64_t>(units.size());
  for_each(num_units, is_small(p, tiles) ? num_units : 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const auto [index, segment] = units[static_cast<size_t>(u)];
      const AttentionTile& tile = tiles[static_cast<size_t>(index)];
      const Segments& of_tile = plan[static_cast<size_t>(index)];
      const int64_t size = tile.num_rows * (p.num_heads / p.num_kv_heads) * attention_result_floats(p.head_size);
      kernels().attend_segment(p, tile, segment, partials + of_tile.partials + (segment - of_tile.begin) * size);
    }
  });
  for (const Segments& s : plan) {
    kernels().merge_segments(p, tiles[static_cast<size_t>(s.tile)], partials + s.partials, s.end - s.begin, output);
  }
}

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                       const Tensor& query_start_loc, const Tensor& seq_lens, double softmax_scale, double key_scale,
                       double value_scale, int64_t sliding_window, double soft_cap) {
  const char* op = "bitsmith::paged_attention";
  PagedAttention p{};
  p.type = cache_type(key_cache, value_cache, op);
  const Tensor q = heads_of(query, "query", op);
  p.num_heads = q.size(1);
  p.num_kv_heads = key_cache.size(1);
  p.head_size = key_cache.size(3);
  TORCH_CHECK_VALUE(q.size(2) == p.head_size && p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0, op, ": query ",
                    q.sizes(), " does not fit a cache of ", p.num_kv_heads, " heads of size ", p.head_size);
  TORCH_CHECK_VALUE(sliding_window >= 0 && soft_cap >= 0, op, ": sliding_window and soft_cap must not be negative, got ",
                    sliding_window, " and ", soft_cap);
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
  if (num_tiles < 8 * at::get_num_threads()) {
    attend_split(p, tiles, to);
  } else {
    for_each(num_tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernels().attend(p, tiles[static_cast<size_t>(i)], to);
    });
  }
  return output;
}

}  // namespace

TORCH_LIBRARY(bitsmith, m) {
  m.def("linear_dense(Tensor x, Tensor weight, Tensor? bias, int activations) -> Tensor");
  m.def("linear_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, int in_features, "
        "int out_features, int group_size, int num_bits, int activations) -> Tensor");
  m.def("write_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "float key_scale, float value_scale) -> ()");
  m.def("paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
        "Tensor query_start_loc, Tensor seq_lens, float softmax_scale, float key_scale, float value_scale, "
        "int sliding_window, float soft_cap) -> Tensor");
  m.def("select_form(str name) -> ()", [](c10::string_view name) { select_form(name); });
  m.def("active_form() -> str", [] { return active_form(); });
}

TORCH_LIBRARY_IMPL(bitsmith, CPU, m) {
  m.impl("linear_dense", &linear_dense);
  m.impl("linear_quantized", &linear_quantized);
  m.impl("write_kv_cache", &write_kv_cache);
  m.impl("paged_attention", &paged_attention);
}

}  // namespace bitsmith

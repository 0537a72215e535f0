// What an operator asks of a kernel: plain structs over raw pointers, and one table of functions per form
// (`forms.h` lists them). Operators check tensors and split work over threads; kernels do a range of it.
//
// Every kernel computes an output element by one order of operations, whatever the number of rows.
#pragma once

#include <cstdint>

namespace bitsmith {

constexpr int64_t kRowBlock = 16;        // output rows packed together in a quantized weight
constexpr int64_t kBlockTokens = 16;     // tokens in a block of the KV cache
constexpr int64_t kSegmentTokens = 256;  // context is summed in segments of this many positions

// What a product of one token reads next is asked for so many bytes ahead: the hardware's own prefetch stops
// at every page, and rows of small models are shorter than one.
constexpr int64_t kPrefetchBytes = 4096;

enum class Activations : int64_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kE4m3 = 3 };
enum class CacheType { kFloat32, kBfloat16, kE4m3, kInt8 };

// y[t, n] = sum over k of x[t, k] * weight[n, k] + bias[n].
struct DenseLinear {
  const float* x;      // [num_tokens, padded_in], arranged by `arrange_dense`
  const void* weight;  // [out_features, in_features], bf16 or fp32, row-major
  const float* bias;   // [out_features] or null
  float* y;            // [num_tokens, out_features]
  int64_t num_tokens, in_features, padded_in, out_features;
  bool is_bf16;
};

// Rows of activations as the quantized kernels want them. Only the fields that the mode needs are set.
struct ArrangedActivations {
  float* x;          // [num_tokens, in_features], modes fp32 and bf16
  int8_t* x_int8;    // [num_tokens, in_features], int8; null where the form takes x_int16
  int16_t* x_int16;  // [num_tokens, in_features], the same in 16 bits; each four are x0 x2 x1 x3
  float* scale;      // [num_tokens, num_groups], int8: real = x * scale
  int32_t* sum;      // [num_tokens, num_groups], int8: sum of the integers of a group
};

// y[t, n] = sum over k of x[t, k] * (q[n, k] - zero_point[n, group]) * scale[n, group] + bias[n].
// Row blocks of 16 rows. 4 bits: 64 bytes hold 8 inputs, byte row * 4 + j has input j low and input j + 4
// high, stored as q + 8. 8 bits: 64 bytes hold 4 inputs, byte row * 4 + j has input j, two's complement.
struct QuantizedLinear {
  ArrangedActivations activations;
  const uint8_t* weight;     // [row blocks, in_features * num_bits / 32, 64]
  const void* scale;         // [>= row blocks, num_groups, 16], bf16 or fp32
  const int8_t* zero_point;  // [>= row blocks, num_groups, 16] or null
  const float* bias;         // [out_features] or null
  float* y;                  // [num_tokens, out_features]
  int64_t num_tokens, in_features, out_features, group_size, num_groups;
  int num_bits;
  bool is_int8, scale_is_bf16;
};

// y[t, n] = (sum over k of x[t, k] * weight[n, k]) * scale[n] * x_scale[t] + bias[n].
struct Fp8Linear {
  float* x;               // [num_tokens, padded_in], rounded as the mode says; zeros beyond in_features
  float* x_scale;         // [num_tokens], 1 where inputs are not e4m3
  const uint8_t* weight;  // [out_features, padded_in] e4m3, zeros beyond in_features
  const float* scale;     // [out_features]
  const float* bias;      // [out_features] or null
  float* y;               // [num_tokens, out_features]
  int64_t num_tokens, in_features, padded_in, out_features;
};

// y[t, i] = activation(gate[t, i]) * up[t, i]; a row of gate_up is gate, then up.
struct GatedActivation {
  const float* gate_up;  // [num_tokens, 2 * size], rows `stride` apart
  float* y;              // [num_tokens, size]
  int64_t stride, size;
  bool is_gelu;  // else silu
};

struct CacheWrite {
  const float* source;  // [num_tokens, num_kv_heads, head_size]
  void* cache;          // [num_blocks, num_kv_heads, 16, head_size]
  const int64_t* slot_mapping;
  int64_t token_stride, head_stride, num_kv_heads, head_size;
  float scale;  // stored = real / scale
  CacheType type;
};

struct PagedAttention {
  const float* query;  // [num_tokens, num_heads, head_size]
  const void* key_cache;
  const void* value_cache;
  int64_t query_token_stride, query_head_stride;
  int64_t num_heads, num_kv_heads, head_size;
  float score_scale;  // softmax_scale * key_scale
  float value_scale;
  int64_t sliding_window;
  float soft_cap;
  CacheType type;
};

// Consecutive query rows of one request, for one KV head.
struct AttentionTile {
  const int32_t* block_table;     // cache blocks of the request
  int64_t first_token, num_rows;  // rows of the query
  int64_t first_position;         // of the first row in its request
  int64_t kv_head;
};

// Heads are padded to whole vectors. A partial result of attention: weighted values, maximum, sum; rounded
// up so that the next one starts at a vector too.
constexpr int64_t padded_head(int64_t head_size) { return (head_size + 7) / 8 * 8; }
constexpr int64_t attention_result_floats(int64_t head_size) { return padded_head(head_size) + 8; }

struct Kernels {
  const char* name;
  bool widens_int8;  // products of 8-bit weights and int8 activations take x_int16, not x_int8
  void (*arrange_dense)(const DenseLinear&, const float* source, int64_t stride, bool round_bf16, float* x,
                        int64_t begin, int64_t end);
  void (*linear_dense)(const DenseLinear&, int64_t row_begin, int64_t row_end);
  void (*arrange_quantized)(const QuantizedLinear&, const float* source, int64_t stride, bool round_bf16,
                            int64_t begin, int64_t end);
  void (*linear_quantized)(const QuantizedLinear&, int64_t block_begin, int64_t block_end);
  void (*gated_activation)(const GatedActivation&, int64_t token_begin, int64_t token_end);
  void (*write_cache)(const CacheWrite&, int64_t token_begin, int64_t token_end);
  // Whole rows: segments in order, merged as they come. `output` is [num_tokens, num_heads, head_size].
  void (*attend)(const PagedAttention&, const AttentionTile&, float* output);
  // One segment of a tile into `partial`: for each row and head, `attention_result_floats` floats.
  void (*attend_segment)(const PagedAttention&, const AttentionTile&, int64_t segment, float* partial);
  // Merge the partials of a tile's segments, in order, and write its rows of the output.
  void (*merge_segments)(const PagedAttention&, const AttentionTile&, const float* partials,
                         int64_t num_segments, float* output);
  void (*arrange_fp8)(const Fp8Linear&, const float* source, int64_t stride, Activations mode,
                      float static_scale, int64_t begin, int64_t end);
  void (*linear_fp8)(const Fp8Linear&, int64_t row_begin, int64_t row_end);
  // What the processor can do at most in this form's instructions; each returns the operations done.
  int64_t (*multiply_add_fp32)(int64_t num_steps);
  int64_t (*multiply_add_int8)(int64_t num_steps);
};

const Kernels* portable_kernels();
// Null where the build has not the instructions.
const Kernels* avx2_kernels();
const Kernels* avx_vnni_kernels();
const Kernels* avx512_vnni_kernels();

}  // namespace bitsmith

// The linear operators: checks of every argument, scratch, threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

#include "forms.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace bitsmith {

using at::Tensor;

struct OfDense;
struct OfQuantized;

inline Activations activations_mode(int64_t activations, const char* op) {
  TORCH_CHECK_VALUE(activations >= 0 && activations <= 2, op,
                    ": activations must be 0 (fp32), 1 (bf16) or 2 (int8), got ", activations);
  return static_cast<Activations>(activations);
}

inline Tensor rows_of(const Tensor& x, int64_t in_features, const char* op) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, op, ": x must be float32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [num_tokens, in_features], got ", x.sizes());
  TORCH_CHECK_VALUE(x.size(1) == in_features, op, ": x has ", x.size(1), " columns, the weight ",
                    in_features);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

inline const float* bias_data(const std::optional<Tensor>& bias, int64_t out_features, const char* op) {
  if (!bias.has_value()) return nullptr;
  TORCH_CHECK_VALUE(bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->dim() == 1 &&
                        bias->size(0) == out_features,
                    op, ": bias must be contiguous float32 [", out_features, "], got ", bias->scalar_type(),
                    " ", bias->sizes());
  return bias->const_data_ptr<float>();
}

inline Tensor linear_dense(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                           int64_t activations) {
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
  for_each(p.num_tokens, p.padded_in * 8, kAnyPart, [&](int64_t begin, int64_t end) {
    kernels().arrange_dense(p, source, stride, mode == Activations::kBfloat16, arranged, begin, end);
  });
  if (p.num_tokens == 0) return y;
  constexpr int64_t kUnit = 12;  // rows; a multiple of what the tiles hold
  const int64_t unit_bytes = kUnit * p.in_features * (p.is_bf16 ? 2 : 4) * (1 + p.num_tokens / 4);
  for_each(ceil_div(p.out_features, kUnit), unit_bytes, kAnyPart, [&](int64_t begin, int64_t end) {
    kernels().linear_dense(p, begin * kUnit, std::min(end * kUnit, p.out_features));
  });
  return y;
}

inline void check_packed(const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& zero_point,
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
                        weight.is_contiguous() &&
                        weight.numel() == blocks * kRowBlock * p.in_features * p.num_bits / 8,
                    op, ": packed weight must be contiguous uint8 or int8 with ",
                    blocks * kRowBlock * p.in_features * p.num_bits / 8, " bytes, got ", weight.scalar_type(),
                    " ", weight.sizes());
  const int64_t needed = blocks * p.num_groups * kRowBlock;
  TORCH_CHECK_VALUE((scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kBFloat16) &&
                        scale.is_contiguous() && scale.numel() >= needed,
                    op, ": packed scale must be contiguous float32 or bfloat16 with at least ", needed,
                    " elements, got ", scale.scalar_type(), " ", scale.sizes());
  if (zero_point.has_value()) {
    TORCH_CHECK_VALUE(zero_point->scalar_type() == at::kChar && zero_point->is_contiguous() &&
                          zero_point->numel() >= needed,
                      op, ": packed zero_point must be contiguous int8 with at least ", needed,
                      " elements, got ", zero_point->scalar_type(), " ", zero_point->sizes());
  }
}

inline void assign_scratch(QuantizedLinear& p) {
  const int64_t inputs = p.num_tokens * p.in_features;
  if (!p.is_int8) {
    p.activations.x = scratch<float, OfQuantized>(inputs);
    return;
  }
  if (p.num_bits == 4 || !kernels().widens_int8) {
    p.activations.x_int8 = scratch<int8_t, OfQuantized>(inputs);
  } else {
    p.activations.x_int16 = scratch<int16_t, OfQuantized>(inputs);
  }
  p.activations.scale = scratch<float, OfQuantized>(p.num_tokens * p.num_groups);
  p.activations.sum = scratch<int32_t, OfQuantized>(p.num_tokens * p.num_groups);
}

inline Tensor linear_quantized(const Tensor& x, const Tensor& weight, const Tensor& scale,
                               const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias,
                               int64_t in_features, int64_t out_features, int64_t group_size,
                               int64_t num_bits, int64_t activations) {
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
  for_each(p.num_tokens, in_features * 8, kAnyPart, [&](int64_t begin, int64_t end) {
    kernels().arrange_quantized(p, source, stride, mode == Activations::kBfloat16, begin, end);
  });
  if (p.num_tokens == 0) return y;
  const int64_t unit_bytes = kRowBlock * in_features * num_bits / 8 * (1 + p.num_tokens / 4);
  for_each(ceil_div(out_features, kRowBlock), unit_bytes, kAnyPart,
           [&](int64_t begin, int64_t end) { kernels().linear_quantized(p, begin, end); });
  return y;
}

}  // namespace bitsmith

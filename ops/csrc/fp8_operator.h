// The operator with FP8 weights: checks of every argument, scratch, threads.
#pragma once

#include <cmath>
#include <optional>

#include "linear_operators.h"

namespace bitsmith {

struct OfFp8Inputs;
struct OfFp8InputScales;

inline Activations fp8_activations_mode(int64_t activations, const char* op) {
  TORCH_CHECK_VALUE(activations == 0 || activations == 1 || activations == 3, op,
                    ": activations must be 0 (fp32), 1 (bf16) or 3 (e4m3), got ", activations);
  return static_cast<Activations>(activations);
}

// input_scale: the static scale of e4m3 inputs, 0 for one of each token's own.
inline Tensor linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                         const std::optional<Tensor>& bias, int64_t in_features, double input_scale,
                         int64_t activations) {
  const char* op = "bitsmith::linear_fp8";
  const Activations mode = fp8_activations_mode(activations, op);
  TORCH_CHECK_VALUE(std::isfinite(input_scale) && input_scale >= 0.0, op,
                    ": input_scale must be finite and not negative, got ", input_scale);
  TORCH_CHECK_VALUE(in_features > 0, op, ": in_features must be positive, got ", in_features);
  Fp8Linear p{};
  p.in_features = in_features;
  p.padded_in = ceil_div(in_features, 8) * 8;
  TORCH_CHECK_VALUE(weight.scalar_type() == at::kByte && weight.dim() == 2 && weight.is_contiguous() &&
                        weight.size(1) == p.padded_in,
                    op, ": weight must be contiguous uint8 [out_features, ", p.padded_in, "], got ",
                    weight.scalar_type(), " ", weight.sizes());
  p.out_features = weight.size(0);
  TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat && scale.dim() == 1 && scale.is_contiguous() &&
                        scale.size(0) == p.out_features,
                    op, ": scale must be contiguous float32 [", p.out_features, "], got ",
                    scale.scalar_type(), " ", scale.sizes());
  const Tensor rows = rows_of(x, in_features, op);
  p.num_tokens = rows.size(0);
  p.weight = weight.const_data_ptr<uint8_t>();
  p.scale = scale.const_data_ptr<float>();
  p.bias = bias_data(bias, p.out_features, op);
  Tensor y = at::empty({p.num_tokens, p.out_features}, x.options());
  p.y = y.mutable_data_ptr<float>();
  p.x = scratch<float, OfFp8Inputs>(p.num_tokens * p.padded_in);
  p.x_scale = scratch<float, OfFp8InputScales>(p.num_tokens);
  const float* source = rows.const_data_ptr<float>();
  const int64_t stride = rows.stride(0);
  const float static_scale = static_cast<float>(input_scale);
  for_each(p.num_tokens, p.padded_in * 8, kAnyPart, [&](int64_t begin, int64_t end) {
    kernels().arrange_fp8(p, source, stride, mode, static_scale, begin, end);
  });
  if (p.num_tokens == 0) return y;
  constexpr int64_t kUnit = 12;  // rows; what the kernel decodes at once
  const int64_t unit_bytes = kUnit * p.padded_in * (2 + p.num_tokens);
  for_each(ceil_div(p.out_features, kUnit), unit_bytes, kAnyPart, [&](int64_t begin, int64_t end) {
    kernels().linear_fp8(p, begin * kUnit, std::min(end * kUnit, p.out_features));
  });
  return y;
}

}  // namespace bitsmith

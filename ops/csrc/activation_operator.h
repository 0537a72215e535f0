// The operator of gated activations: checks of its arguments, threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "forms.h"
#include "kernels.h"
#include "parallel.h"

namespace bitsmith {

using at::Tensor;

inline Tensor gated_activation(const Tensor& gate_up, bool is_gelu) {
  const char* op = "bitsmith::gated_activation";
  TORCH_CHECK_VALUE(gate_up.scalar_type() == at::kFloat && gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, op,
                    ": gate_up must be float32 [num_tokens, 2 * size], got ", gate_up.scalar_type(), " ",
                    gate_up.sizes());
  const Tensor rows = gate_up.stride(1) == 1 || gate_up.size(1) == 0 ? gate_up : gate_up.contiguous();
  const int64_t num_tokens = rows.size(0), size = rows.size(1) / 2;
  Tensor y = at::empty({num_tokens, size}, rows.options());
  const GatedActivation p{rows.const_data_ptr<float>(), y.mutable_data_ptr<float>(), rows.stride(0), size,
                          is_gelu};
  constexpr int64_t kBytesEach = 64;  // an exponential and a division, as bytes streamed in that time
  for_each(num_tokens, size * kBytesEach, kAnyPart,
           [&](int64_t begin, int64_t end) { kernels().gated_activation(p, begin, end); });
  return y;
}

}  // namespace bitsmith

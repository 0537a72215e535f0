// Calls the kernels of a form by the form's own table, without torch.
#include <string>
#include <vector>

#include "forms.h"

namespace bitsmith {

// Only the emulated forms are linked in.
const Kernels* portable_kernels() { return nullptr; }
const Kernels* avx2_kernels() { return nullptr; }

const Kernels* form_named(const std::string& name) {
  for (const Kernels* form : all_forms())
    if (form != nullptr && name == form->name) return form;
  return nullptr;
}

}  // namespace bitsmith

using namespace bitsmith;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const char* fastest_form() { return kernels().name; }

// sizes: num_tokens, in_features, out_features, group_size, num_bits. x: contiguous rows.
EXPORTED void linear_quantized(const char* form, const int64_t* sizes, bool scale_is_bf16, const float* x,
                               const uint8_t* weight, const void* scale, const int8_t* zero_point,
                               const float* bias, float* y) {
  const Kernels& table = *form_named(form);
  QuantizedLinear p{};
  p.num_tokens = sizes[0];
  p.in_features = sizes[1];
  p.out_features = sizes[2];
  p.group_size = sizes[3];
  p.num_groups = p.in_features / p.group_size;
  p.num_bits = static_cast<int>(sizes[4]);
  p.is_int8 = true;
  p.scale_is_bf16 = scale_is_bf16;
  p.weight = weight;
  p.scale = scale;
  p.zero_point = zero_point;
  p.bias = bias;
  p.y = y;
  // Exactly as large as they must be, so that a sanitizer sees a read beyond them.
  std::vector<int8_t> bytes(static_cast<size_t>(p.num_tokens * p.in_features));
  std::vector<float> scales(static_cast<size_t>(p.num_tokens * p.num_groups));
  std::vector<int32_t> sums(scales.size());
  p.activations = {nullptr, bytes.data(), nullptr, scales.data(), sums.data()};
  table.arrange_quantized(p, x, p.in_features, false, 0, p.num_tokens);
  // Two parts, as two threads would do them.
  const int64_t blocks = (p.out_features + kRowBlock - 1) / kRowBlock;
  table.linear_quantized(p, blocks / 2, blocks);
  table.linear_quantized(p, 0, blocks / 2);
}

// sizes: num_tokens, in_features, out_features. x: contiguous rows.
EXPORTED void linear_dense(const char* form, const int64_t* sizes, bool is_bf16, const float* x,
                           const void* weight, const float* bias, float* y) {
  const Kernels& table = *form_named(form);
  DenseLinear p{};
  p.num_tokens = sizes[0];
  p.in_features = sizes[1];
  p.out_features = sizes[2];
  p.padded_in = (p.in_features + 15) / 16 * 16;
  p.is_bf16 = is_bf16;
  p.weight = weight;
  p.bias = bias;
  p.y = y;
  std::vector<float> arranged(static_cast<size_t>(p.num_tokens * p.padded_in));
  p.x = arranged.data();
  table.arrange_dense(p, x, p.in_features, false, arranged.data(), 0, p.num_tokens);
  table.linear_dense(p, p.out_features / 2, p.out_features);
  table.linear_dense(p, 0, p.out_features / 2);
}

EXPORTED int64_t multiply_add(const char* form, int64_t num_steps, bool is_int8) {
  const Kernels& table = *form_named(form);
  return (is_int8 ? table.multiply_add_int8 : table.multiply_add_fp32)(num_steps);
}

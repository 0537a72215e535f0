// The operators as torch sees them.
#include <torch/library.h>

#include <string>

#include "activation_operator.h"
#include "cache_operators.h"
#include "ceiling_operators.h"
#include "forms.h"
#include "fp8_operator.h"
#include "linear_operators.h"
#include "parallel.h"

namespace bitsmith {
namespace {

void select_form(c10::string_view name) {
  for (const Kernels* form : all_forms()) {
    if (form != nullptr && name == form->name) {
      active_kernels.store(form);
      return;
    }
  }
  TORCH_CHECK_VALUE(false, "bitsmith::select_form: this build has no form \"", name, "\"");
}

std::string active_form() { return kernels().name; }

void set_num_threads(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "bitsmith::set_num_threads: ", count, " threads; 0 means as many as torch");
  chosen_num_threads.store(count);
}

}  // namespace

TORCH_LIBRARY(bitsmith, m) {
  m.def("linear_dense(Tensor x, Tensor weight, Tensor? bias, int activations) -> Tensor");
  m.def(
      "linear_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, Tensor? bias, int "
      "in_features, "
      "int out_features, int group_size, int num_bits, int activations) -> Tensor");
  m.def(
      "write_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
      "slot_mapping, "
      "float key_scale, float value_scale) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor query_start_loc, Tensor seq_lens, float softmax_scale, float key_scale, float value_scale, "
      "int sliding_window, float soft_cap) -> Tensor");
  m.def(
      "linear_fp8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int in_features, float input_scale, "
      "int activations) -> Tensor");
  m.def("gated_activation(Tensor gate_up, bool is_gelu) -> Tensor");
  m.def("ceiling_read(Tensor data) -> int");
  m.def("ceiling_arithmetic(int num_steps, bool is_int8) -> int",
        [](int64_t num_steps, bool is_int8) { return ceiling_arithmetic(num_steps, is_int8); });
  m.def("select_form(str name) -> ()", [](c10::string_view name) { select_form(name); });
  m.def("active_form() -> str", [] { return active_form(); });
  m.def("set_num_threads(int count) -> ()", [](int64_t count) { set_num_threads(count); });
  m.def("num_threads() -> int", [] { return num_threads(); });
}

TORCH_LIBRARY_IMPL(bitsmith, CPU, m) {
  m.impl("linear_dense", &linear_dense);
  m.impl("linear_quantized", &linear_quantized);
  m.impl("linear_fp8", &linear_fp8);
  m.impl("gated_activation", &gated_activation);
  m.impl("ceiling_read", &ceiling_read);
  m.impl("write_kv_cache", &write_kv_cache);
  m.impl("paged_attention", &paged_attention);
}

}  // namespace bitsmith

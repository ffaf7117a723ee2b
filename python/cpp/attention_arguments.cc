#include "attention_arguments.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "minference/attention.h"
#include "minference/error.h"
#include "tensor_argument.h"

namespace nb = nanobind;

namespace minference::python {

AttentionArguments::AttentionArguments(nb::handle q_object, nb::handle k_object,
                                       nb::handle v_object)
    : q("q", q_object, Access::kRead),
      k("k", k_object, Access::kRead),
      v("v", v_object, Access::kRead) {}

AttentionInput AttentionArguments::input() const {
  AttentionInput input;
  input.q = q.view();
  input.k = k.view();
  input.v = v.view();
  input.q_lens = q_lens;
  input.kv_lens = kv_lens;
  input.block_table = table.pages;
  input.pages_per_sequence = table.pages_per_sequence;
  input.sinks = sinks;
  input.mask = {mask.words, mask.row_stride, mask.sequence_stride};
  return input;
}

Precision parse_precision(const std::string& name) {
  if (name == "auto") return Precision::kAuto;
  if (name == "f32") return Precision::kF32;
  if (name == "bf16") return Precision::kBF16;
  throw InvalidArgument("precision is '" + name + "'; legal: auto, f32, bf16");
}

}  // namespace minference::python

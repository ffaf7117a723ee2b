// The inputs of a call of attention() as Python gave them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "minference/attention.h"
#include "tensor_argument.h"

namespace minference::python {

// Everything that a call reads; its AttentionInput points into it. The GIL is needed to make and to
// destroy one.
struct AttentionArguments {
  TensorArgument q;
  TensorArgument k;
  TensorArgument v;
  std::vector<std::int64_t> q_lens;
  std::vector<std::int64_t> kv_lens;
  BlockTable table;
  std::vector<float> sinks;
  PackedMask mask;
  AttentionParams params;

  AttentionArguments(nanobind::handle q, nanobind::handle k, nanobind::handle v);

  std::int64_t batch() const { return q.view().batch(); }

  // Keys that a row of a mask has.
  std::int64_t key_capacity() const {
    return table.pages.empty() ? k.view().tokens() : table.pages_per_sequence * k.view().tokens();
  }

  AttentionInput input() const;
};

// Throws InvalidArgument listing the legal names.
Precision parse_precision(const std::string& name);

}  // namespace minference::python

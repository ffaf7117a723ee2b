// The inputs of a call of attention() as Python gave them, and the device that computes.
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

  // Where q lies. Throws InvalidArgument unless k and v lie there too.
  Device device() const;
};

// Throws InvalidArgument listing the legal names.
Precision parse_precision(const std::string& name);

// Throws InvalidArgument, naming the argument `name`, unless `device` is q's.
void require_same_device(const char* name, const Device& device, const Device& q);

// Throws Unsupported for a device that the library never computes on.
void require_device(const Device& device);

}  // namespace minference::python

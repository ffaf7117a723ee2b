// The contract of attention(), checked in one place: no kernel is reached without passing here.
#include "attention/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "core/checked.h"
#include "core/format_number.h"
#include "minference/error.h"

namespace minference {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;
constexpr int kMaxThreads = 4096;

std::string text(std::int64_t value) { return std::to_string(value); }

std::string shape_text(const TensorView& tensor) {
  return "[" + text(tensor.shape[0]) + ", " + text(tensor.shape[1]) + ", " + text(tensor.shape[2]) +
         ", " + text(tensor.shape[3]) + "]";
}

void require_range(const std::string& name, std::int64_t value, std::int64_t low,
                   std::int64_t high) {
  if (value < low || value > high) {
    throw InvalidArgument(name + " is " + text(value) + "; legal: " + text(low) + " to " +
                          text(high));
  }
}

bool has_elements(const TensorView& tensor) {
  return std::none_of(tensor.shape.begin(), tensor.shape.end(),
                      [](std::int64_t extent) { return extent == 0; });
}

void validate_tensor(const std::string& name, const TensorView& tensor) {
  if (tensor.dtype != DType::kF32 && tensor.dtype != DType::kF16 && tensor.dtype != DType::kBF16) {
    throw InvalidArgument(name + " has dtype " + text(static_cast<int>(tensor.dtype)) +
                          "; legal: f32 (0), f16 (1), bf16 (2)");
  }
  static constexpr const char* kAxes[] = {"batch", "tokens", "heads", "dim"};
  for (int axis = 0; axis < 4; ++axis) {
    if (tensor.shape[axis] < 0) {
      throw InvalidArgument(name + " has " + kAxes[axis] + " extent " + text(tensor.shape[axis]) +
                            "; legal: 0 or more");
    }
  }
  if (!has_elements(tensor)) return;
  if (tensor.empty()) {
    throw InvalidArgument(name + " has no data but shape " + shape_text(tensor));
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_size(tensor.dtype) != 0) {
    throw InvalidArgument(name + " has data at an address that is no multiple of " +
                          text(dtype_size(tensor.dtype)) + "; legal: aligned elements");
  }
  if (tensor.shape[3] > 1 && tensor.strides[3] != 1) {
    throw InvalidArgument(name + " has stride " + text(tensor.strides[3]) +
                          " along dim; legal: 1 (rows of a head must be contiguous)");
  }
  // The byte distance from `data` to every element has to fit, in both directions.
  const std::string extent_name = "the byte extent of " + name;
  std::int64_t below = 0;
  std::int64_t above = 0;
  for (int axis = 0; axis < 4; ++axis) {
    const std::int64_t reach =
        checked_mul(tensor.strides[axis], tensor.shape[axis] - 1, extent_name.c_str());
    std::int64_t& side = reach < 0 ? below : above;
    side = checked_add(side, reach, extent_name.c_str());
  }
  checked_mul(below, dtype_size(tensor.dtype), extent_name.c_str());
  checked_mul(checked_add(above, 1, extent_name.c_str()), dtype_size(tensor.dtype),
              extent_name.c_str());
}

// Threads write different rows of an output, so two rows must not be the same memory.
void validate_written(const std::string& name, const TensorView& tensor) {
  for (int axis = 0; axis < 3; ++axis) {
    if (has_elements(tensor) && tensor.shape[axis] > 1 && tensor.strides[axis] == 0) {
      throw InvalidArgument(name + " has stride 0 along axis " + text(axis) + " of extent " +
                            text(tensor.shape[axis]) + "; legal: outputs that do not overlap");
    }
  }
}

void validate_shapes(const AttentionInput& input) {
  const TensorView& q = input.q;
  const TensorView& k = input.k;
  const TensorView& v = input.v;
  for (int axis = 0; axis < 3; ++axis) {
    if (k.shape[axis] != v.shape[axis]) {
      throw InvalidArgument("k has shape " + shape_text(k) + " and v " + shape_text(v) +
                            "; only their last extent may differ");
    }
  }
  if (q.heads() < 1 || k.heads() < 1 || q.heads() % k.heads() != 0) {
    throw InvalidArgument("q has " + text(q.heads()) + " heads and k and v have " +
                          text(k.heads()) + "; legal: both at least 1, q's a multiple of k's");
  }
  require_range("head_dim of q", q.dim(), 1, kMaxHeadDim);
  require_range("head_dim of v", v.dim(), 1, kMaxHeadDim);
  if (k.dim() != q.dim()) {
    throw InvalidArgument("head_dim of k is " + text(k.dim()) + "; legal: that of q, " +
                          text(q.dim()));
  }
}

void validate_lengths(const std::string& name, std::span<const std::int64_t> lengths,
                      std::int64_t batch, std::int64_t tokens) {
  if (lengths.empty()) return;
  if (static_cast<std::int64_t>(lengths.size()) != batch) {
    throw InvalidArgument(name + " has " + text(static_cast<std::int64_t>(lengths.size())) +
                          " entries; legal: none or one per sequence, " + text(batch));
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    require_range(name + "[" + text(b) + "]", lengths[b], 0, tokens);
  }
}

void validate_pages(const AttentionInput& input) {
  const std::int64_t batch = input.q.batch();
  const std::int64_t per_sequence = input.pages_per_sequence;
  const std::int64_t page_size = input.k.tokens();
  const auto entries = static_cast<std::int64_t>(input.block_table.size());
  if (per_sequence < 1 ||
      entries != checked_mul(batch, per_sequence, "the size of a block table")) {
    throw InvalidArgument("block_table has " + text(entries) +
                          " entries and pages_per_sequence is " + text(per_sequence) +
                          "; legal: batch * pages_per_sequence entries for a batch of " +
                          text(batch));
  }
  if (page_size < 1) throw InvalidArgument("page_size is 0; legal: 1 or more");
  if (input.kv_lens.empty()) {
    throw InvalidArgument("kv_lens has 0 entries; with a block table one per sequence is required");
  }
  validate_lengths("kv_lens", input.kv_lens, batch, key_capacity(input));
  for (std::int64_t b = 0; b < batch; ++b) {
    // Entries behind the last used page may hold anything.
    const std::int64_t length = input.kv_lens[b];
    const std::int64_t used = length == 0 ? 0 : (length - 1) / page_size + 1;
    for (std::int64_t p = 0; p < used; ++p) {
      require_range("block_table entry " + text(p) + " of sequence " + text(b),
                    input.block_table[b * per_sequence + p], 0, input.k.batch() - 1);
    }
  }
}

void validate_contiguous_kv(const AttentionInput& input) {
  if (input.pages_per_sequence != 0) {
    throw InvalidArgument("pages_per_sequence is " + text(input.pages_per_sequence) +
                          " without a block table; legal: 0");
  }
  if (input.k.batch() != input.q.batch()) {
    throw InvalidArgument("k has batch " + text(input.k.batch()) + "; legal: that of q, " +
                          text(input.q.batch()));
  }
  validate_lengths("kv_lens", input.kv_lens, input.q.batch(), input.k.tokens());
}

std::int64_t longest(std::span<const std::int64_t> lengths, std::int64_t otherwise) {
  return lengths.empty() ? otherwise : *std::max_element(lengths.begin(), lengths.end());
}

void validate_mask(const AttentionInput& input) {
  const VisibilityMask& mask = input.mask;
  if (mask.empty()) return;
  const std::int64_t rows = longest(input.q_lens, input.q.tokens());
  const std::int64_t keys = longest(input.kv_lens, input.k.tokens());
  if (rows == 0 || keys == 0) return;
  const std::int64_t words = (keys - 1) / 64 + 1;
  if (rows > 1 && mask.row_stride < words) {
    throw InvalidArgument("row_stride of the mask is " + text(mask.row_stride) +
                          "; legal: at least the words of " + text(keys) + " keys, " + text(words));
  }
  // Only 0 can mean that the sequences share one mask.
  const std::int64_t one_sequence =
      checked_add(checked_mul(rows - 1, mask.row_stride, "the size of the mask"), words,
                  "the size of the mask");
  if (input.q.batch() > 1 && mask.sequence_stride != 0 && mask.sequence_stride < one_sequence) {
    throw InvalidArgument("sequence_stride of the mask is " + text(mask.sequence_stride) +
                          "; legal: 0 (shared) or at least the words of one sequence, " +
                          text(one_sequence));
  }
  checked_mul(
      checked_add(checked_mul(input.q.batch() - 1, mask.sequence_stride, "the size of the mask"),
                  one_sequence, "the size of the mask"),
      8, "the size of the mask");
}

void validate_sinks(const AttentionInput& input) {
  if (input.sinks.empty()) return;
  const auto count = static_cast<std::int64_t>(input.sinks.size());
  if (count != input.q.heads()) {
    throw InvalidArgument("sinks has " + text(count) +
                          " entries; legal: none or one per query head, " + text(input.q.heads()));
  }
  for (std::int64_t h = 0; h < count; ++h) {
    const float sink = input.sinks[h];
    if (std::isnan(sink) || sink == std::numeric_limits<float>::infinity()) {
      throw InvalidArgument("sinks[" + text(h) + "] is " + format_number(sink) +
                            "; legal: a finite logit, or -inf for none");
    }
  }
}

void validate_params(const AttentionParams& params) {
  if (!std::isfinite(params.scale)) {
    throw InvalidArgument("scale is " + format_number(params.scale) +
                          "; legal: a finite number, 0 for 1 / sqrt(head_dim)");
  }
  if (!std::isfinite(params.soft_cap) || params.soft_cap < 0) {
    throw InvalidArgument("soft_cap is " + format_number(params.soft_cap) +
                          "; legal: a finite number above 0, or 0 for none");
  }
  if (params.sliding_window < 0) {
    throw InvalidArgument("sliding_window is " + text(params.sliding_window) +
                          "; legal: 1 or more, or 0 for none");
  }
  require_range("threads", params.threads, 0, kMaxThreads);
  if (params.precision != Precision::kAuto && params.precision != Precision::kF32 &&
      params.precision != Precision::kBF16) {
    throw InvalidArgument("precision is " + text(static_cast<int>(params.precision)) +
                          "; legal: auto (0), f32 (1), bf16 (2)");
  }
}

void validate_output(const AttentionInput& input, const AttentionOutput& output) {
  const TensorView& q = input.q;
  validate_device("out", output.out.device, q.device);
  if (!output.lse.empty()) validate_device("lse", output.lse.device, q.device);
  validate_tensor("out", output.out);
  validate_written("out", output.out);
  TensorView expected;
  expected.shape = {q.batch(), q.tokens(), q.heads(), input.v.dim()};
  if (output.out.shape != expected.shape) {
    throw InvalidArgument("out has shape " + shape_text(output.out) +
                          "; legal: " + shape_text(expected));
  }
  if (output.lse.empty()) return;
  validate_tensor("lse", output.lse);
  validate_written("lse", output.lse);
  expected.shape[3] = 1;
  if (output.lse.shape != expected.shape || output.lse.dtype != DType::kF32) {
    throw InvalidArgument("lse has shape " + shape_text(output.lse) + " and dtype " +
                          dtype_name(output.lse.dtype) + "; legal: " + shape_text(expected) +
                          " of f32");
  }
}

// Statistics count pairs, so their number has to fit too.
void validate_pair_count(const AttentionInput& input) {
  constexpr const char* kWhat = "the number of (row, key) pairs";
  const std::int64_t keys = key_capacity(input);
  const std::int64_t rows =
      checked_mul(checked_mul(input.q.batch(), input.q.tokens(), kWhat), input.q.heads(), kWhat);
  checked_mul(rows, keys, kWhat);
}

}  // namespace

void validate_device(const char* name, Device device, Device q) {
  if (device == q) return;
  throw InvalidArgument(std::string(name) + " is on device " + device_name(device) +
                        "; legal: that of q, " + device_name(q));
}

std::int64_t key_capacity(const AttentionInput& input) {
  if (input.block_table.empty()) return input.k.tokens();
  return checked_mul(input.pages_per_sequence, input.k.tokens(),
                     "the capacity of a paged sequence");
}

void validate_input(const AttentionInput& input, const AttentionParams& params) {
  validate_tensor("q", input.q);
  validate_tensor("k", input.k);
  validate_tensor("v", input.v);
  validate_device("k", input.k.device, input.q.device);
  validate_device("v", input.v.device, input.q.device);
  validate_shapes(input);
  validate_lengths("q_lens", input.q_lens, input.q.batch(), input.q.tokens());
  if (input.block_table.empty()) {
    validate_contiguous_kv(input);
  } else {
    validate_pages(input);
  }
  validate_pair_count(input);
  validate_mask(input);
  validate_sinks(input);
  validate_params(params);
}

void validate(const AttentionInput& input, const AttentionParams& params,
              const AttentionOutput& output) {
  validate_input(input, params);
  validate_output(input, output);
}

}  // namespace minference

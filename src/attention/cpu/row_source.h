// Addresses of K and V rows, contiguous or paged, and gathered by position.
#pragma once

#include <cstdint>

#include "minference/attention.h"

namespace minference::cpu {

// Rows of one KV head of one sequence of `tensor` (the input's k or v).
class RowSource {
 public:
  RowSource(const AttentionInput& input, const TensorView& tensor, std::int64_t b,
            std::int64_t head)
      : tensor_(tensor), b_(b), head_(head) {
    if (!input.block_table.empty()) {
      pages_ = input.block_table.data() + b * input.pages_per_sequence;
    }
  }

  const void* row(std::int64_t token) const {
    if (pages_ == nullptr) return tensor_.row(b_, token, head_);
    const std::int64_t page_size = tensor_.tokens();
    return tensor_.row(pages_[token / page_size], token % page_size, head_);
  }

  // Addresses of tokens begin ... begin + n, or of the n listed tokens.
  void rows(std::int64_t begin, std::int64_t n, const void** out) const {
    for (std::int64_t i = 0; i < n; ++i) out[i] = row(begin + i);
  }
  void gather(const std::int64_t* tokens, std::int64_t n, const void** out) const {
    for (std::int64_t i = 0; i < n; ++i) out[i] = row(tokens[i]);
  }

  // Asks for n rows together. Those of a head lie apart, and what reads them one by one would wait for
  // each.
  void prefetch(const void* const* rows, std::int64_t n) const {
    constexpr std::int64_t kLine = 64;
    const std::int64_t bytes = tensor_.dim() * dtype_size(tensor_.dtype);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto* row = static_cast<const char*>(rows[i]);
      for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at);
    }
  }

 private:
  TensorView tensor_;
  std::int64_t b_;
  std::int64_t head_;
  const std::int32_t* pages_ = nullptr;
};

}  // namespace minference::cpu

// SyntheticChunk: one call of attention() on made-up values, for measuring what kernels cost.
#pragma once

#include <cstdint>
#include <vector>

#include "core/float16.h"
#include "minference/attention.h"

namespace minference {

// The last `rows` rows of a sequence of `keys` keys. Queries are f32 and keys f16, as llama.cpp has
// them.
class SyntheticChunk {
 public:
  struct Shape {
    std::int64_t rows = 0;
    std::int64_t keys = 0;
    std::int64_t q_heads = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t v_head_dim = 0;
  };

  SyntheticChunk(const Shape& shape, int threads)
      : q_(shape.rows * shape.q_heads * shape.head_dim),
        k_(shape.keys * shape.kv_heads * shape.head_dim),
        v_(shape.keys * shape.kv_heads * shape.v_head_dim),
        out_(shape.rows * shape.q_heads * shape.v_head_dim) {
    // Between -1 and 1, as attention has them: no timing of infinities or denormals.
    std::uint32_t state = 1;
    const auto next = [&] {
      state = state * 1664525U + 1013904223U;
      return static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
    };
    for (float& x : q_) x = next();
    for (std::uint16_t& x : k_) x = f32_to_f16(next());
    for (std::uint16_t& x : v_) x = f32_to_f16(next());
    input_.q = TensorView::contiguous(q_.data(), DType::kF32,
                                      {1, shape.rows, shape.q_heads, shape.head_dim});
    input_.k = TensorView::contiguous(k_.data(), DType::kF16,
                                      {1, shape.keys, shape.kv_heads, shape.head_dim});
    input_.v = TensorView::contiguous(v_.data(), DType::kF16,
                                      {1, shape.keys, shape.kv_heads, shape.v_head_dim});
    output_.out = TensorView::contiguous(out_.data(), DType::kF32,
                                         {1, shape.rows, shape.q_heads, shape.v_head_dim});
    params_.threads = threads;
  }
  SyntheticChunk(const SyntheticChunk&) = delete;
  SyntheticChunk& operator=(const SyntheticChunk&) = delete;

  const AttentionInput& input() const { return input_; }
  const AttentionParams& params() const { return params_; }
  const AttentionOutput& output() const { return output_; }

 private:
  std::vector<float> q_;
  std::vector<std::uint16_t> k_;
  std::vector<std::uint16_t> v_;
  std::vector<float> out_;
  AttentionInput input_;
  AttentionParams params_;
  AttentionOutput output_;
};

}  // namespace minference

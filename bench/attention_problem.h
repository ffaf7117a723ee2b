// The attention problem that is measured, and the fp64 judge of its results.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"

namespace minference::bench {

struct ProblemShape {
  std::int64_t tokens = 0;
  std::int64_t q_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
};

// Q and K with what makes real heads sparse: rotary phases that favour near keys, an attention sink
// and a few heavy columns, in noise. Q is f32, K and V are f16, as in llama.cpp.
class AttentionProblem {
 public:
  explicit AttentionProblem(const ProblemShape& shape);

  const ProblemShape& shape() const { return shape_; }
  // [tokens, heads, head_dim], packed.
  const std::vector<float>& q() const { return q_; }
  const std::vector<float>& k() const { return k_; }
  const std::vector<float>& v() const { return v_; }
  const float* result() const { return out_.data(); }

  AttentionInput input();
  AttentionOutput output();
  // The first query head alone, with its KV head.
  AttentionInput one_head_input();
  AttentionOutput one_head_output();
  // (query, key) pairs of the causal area, one head.
  double causal_pairs() const;

  // Query rows [begin, end) of all heads as a chunk of their own, with the keys up to the last.
  AttentionInput rows(std::int64_t begin, std::int64_t end);
  // Query rows [begin, end) of one head as a chunk of their own, with the keys up to the last.
  AttentionInput chunk(std::int64_t head, std::int64_t begin, std::int64_t end);

 private:
  ProblemShape shape_;
  std::vector<float> q_;
  std::vector<float> k_;
  std::vector<float> v_;
  std::vector<float> out_;
  std::vector<std::uint16_t> k16_;
  std::vector<std::uint16_t> v16_;
};

// What attention under one index has to give on sampled row blocks, computed in fp64. All of a long
// prompt would take minutes. The samples go from the first row block to the last, through the
// heads.
class ExpectedRows {
 public:
  // `index` may be null (dense).
  ExpectedRows(AttentionProblem& problem, const SparseIndex* index, int threads);

  // Largest error of a result [tokens, q_heads, head_dim] on the samples, relative to the largest
  // expected value. NaN where the result is.
  double error_of(const float* result) const;

 private:
  struct Sample {
    std::int64_t head = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::vector<float> rows;
  };
  ProblemShape shape_;
  std::vector<Sample> samples_;
};

}  // namespace minference::bench

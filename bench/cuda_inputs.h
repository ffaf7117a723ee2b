// Queries, keys and values on a CUDA device that look like those of a long prompt.
#pragma once

#include <cstdint>

#include "minference/tensor.h"

namespace minference::bench {

enum class InputKind {
  // Unrotated queries and keys share a direction per head, so that after RoPE (base 500,000) scores
  // fall with the distance and diagonals stand out; the first 4 keys and 1 key in 400 are heavy for
  // all queries.
  kStructured,
  // Independent normal values: softmax is nearly even, and no key can be left out.
  kRandom,
};

// bf16 tensors of one sequence, owned; [1, tokens, heads, head_dim]. Values are of order 1.
class CudaInputs {
 public:
  // `seed` gives other values, directions and heavy keys.
  CudaInputs(InputKind kind, std::int64_t tokens, std::int64_t q_heads, std::int64_t kv_heads,
             std::int64_t head_dim, std::uint64_t seed);
  ~CudaInputs();
  CudaInputs(const CudaInputs&) = delete;
  CudaInputs& operator=(const CudaInputs&) = delete;

  TensorView q, k, v, out;
};

}  // namespace minference::bench

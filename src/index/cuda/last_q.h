// Last-q estimator on the device: column and diagonal sums of the softmax of the last 64 queries.
//
// As index/last_q.h. Scores are computed twice instead of being kept: once for the softmax's
// denominators, once for the sums. All sums are taken in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/row_pass.h"

namespace minference::cuda {

inline constexpr int kLastRows = kPassRows;

struct LastQPlan : RowPassPlan {
  std::int64_t stride = 0;  // floats of one head's sums
};

// Sums of the heads of units [first, ...): head i of these in row i.
struct LastQSums {
  float2* partials = nullptr;  // [heads][chunks][64]: maximum and sum of exponentials, base 2
  float* columns = nullptr;    // [heads][stride], per key
  // [heads][stride], entry u: offset kv_len - 1 - u. The first 63 entries of a range still lack what
  // the range before it has in `tails` [heads][chunks * kRanges][64].
  float* diagonals = nullptr;
  float* tails = nullptr;
};

LastQPlan plan_last_q(const Problem& problem);
LastQSums allocate(const Problem& problem, const LastQPlan& plan, MemoryPieces& workspace);

// Enqueues the estimate of `count` units from `first` on. `wanted` [batch * q_heads], on the device:
// heads with 0 are left out.
void estimate_last_q(const Problem& problem, const LastQPlan& plan, const std::uint8_t* wanted,
                     int first, int count, const LastQSums& sums, cudaStream_t stream);

}  // namespace minference::cuda

// Last-q estimator on the device: column and diagonal sums of the softmax of the last 64 queries.
//
// As index/last_q.h. Scores are computed twice instead of being kept: once for the softmax's
// denominators, once for the sums. All sums are taken in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

inline constexpr int kLastRows = 64;

// How the keys of a KV head are shared out. A thread block takes a chunk of kRanges ranges, one to
// each warp of its warpgroups, and a query head a warpgroup.
struct LastQPlan {
  static constexpr int kRanges = 4;
  static constexpr int kStepKeys = 16;           // of a range, in a tile
  static constexpr int kMaxHeads = 4;            // of a thread block
  static constexpr int kStages = 4;              // tiles of keys in flight
  static constexpr int kFixedBytes = 14 * 1024;  // of shared memory, beside the tiles

  int heads = 1;        // of a thread block, a warpgroup each
  int head_groups = 1;  // thread blocks for the query heads of a KV head
  int panels = 1;       // of 64 dims
  int shared_bytes = 0;
  int chunks = 1;
  int range = 16;           // keys, a multiple of 16
  int units = 1;            // (sequence, KV head) pairs that are estimated at a time
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

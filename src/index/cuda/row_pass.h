// RowPass: scores of 64 rows of every query head against all keys of its sequence, range by range of
// keys; what is summed of them is the estimator's own (last_q, coverage).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"

namespace minference::cuda {

// Rows of a head in one pass, at most.
inline constexpr int kPassRows = 64;

// How the keys of a KV head are shared out. A thread block takes a chunk of kRanges ranges, one to
// each warp of its warpgroups, and a query head a warpgroup.
struct RowPassPlan {
  static constexpr int kRanges = 4;
  static constexpr int kStepKeys = 16;           // of a range, in a tile
  static constexpr int kMaxHeads = 4;            // of a thread block
  static constexpr int kStages = 4;              // tiles of keys in flight
  static constexpr int kFixedBytes = 15 * 1024;  // of shared memory, beside the tiles

  int heads = 1;        // of a thread block, a warpgroup each
  int head_groups = 1;  // thread blocks for the query heads of a KV head
  int panels = 1;       // of 64 dims
  int shared_bytes = 0;
  int chunks = 1;
  int range = 16;  // keys, a multiple of 16
  int units = 1;   // (sequence, KV head) pairs of one pass
};

// A plan for sequences of so many keys, `units` of them at a time.
RowPassPlan plan_row_pass(const Problem& problem, std::int64_t keys, std::int64_t units);

}  // namespace minference::cuda

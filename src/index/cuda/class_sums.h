// Last-q estimator by class of key: the sums of last_q.h with those over diagonals apart for keys of
// text and for visual keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/last_q.h"

namespace minference::cuda {

inline constexpr int kKeyClasses = 2;  // text, visual

// Sums of the heads of units [first, ...): head i of these in row i.
struct ClassSums {
  float2* partials = nullptr;  // [heads][chunks][64]: maximum and sum of exponentials, base 2
  float* columns = nullptr;    // [heads][stride], per key
  float* diagonals = nullptr;  // [heads][kKeyClasses][stride], entry u: offset kv_len - 1 - u
  // [heads][kKeyClasses][chunks * kRanges][64]: what a range has of the first diagonals of the next.
  float* tails = nullptr;
};

// Keys that bits of `visual` must exist for.
inline std::int64_t class_keys(const LastQPlan& plan) {
  return static_cast<std::int64_t>(plan.chunks) * LastQPlan::kRanges * plan.range;
}

// Memory for the sums of one sample; `shared`: of an earlier one, whose partials and tails it uses.
ClassSums allocate_class_sums(const Problem& problem, const LastQPlan& plan,
                              const ClassSums* shared, MemoryPieces& workspace);

// Enqueues the estimate of one sequence by its last 64 rows, at most. `visual`: bit k % 32 of word
// k / 32 for a visual key k. `wanted` as for estimate_last_q().
void estimate_by_class(const Problem& problem, const LastQPlan& plan, const std::uint32_t* visual,
                       const std::uint8_t* wanted, int first, int count, const ClassSums& sums,
                       cudaStream_t stream);

}  // namespace minference::cuda

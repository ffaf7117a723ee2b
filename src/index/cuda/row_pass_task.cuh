// What the thread blocks of a row pass know about their work.
#pragma once

#include <cstdint>

#include "index/cuda/row_pass.h"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::row_pass {

inline constexpr int kRanges = RowPassPlan::kRanges;
inline constexpr int kProducerWarps = 2;
inline constexpr int kMaxHeads = RowPassPlan::kMaxHeads;
inline constexpr int kMaxThreads = 128 * kMaxHeads + 32 * kProducerWarps;
inline constexpr int kStages = RowPassPlan::kStages;
inline constexpr int kStepKeys = RowPassPlan::kStepKeys;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

// In shared memory. Rows says which rows of a chunk are looked at: see LastRows and SpreadRows.
template <class Rows>
struct Control {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  float log_sums[kMaxHeads][kPassRows];  // base 2
  float maxima[kMaxHeads][kRanges][kPassRows];
  float2 partials[kMaxHeads][kRanges][kPassRows];  // of the warps
  typename Rows::Shared rows;
};

// What every estimator's kernels get; estimators add their own.
struct Arguments {
  Problem problem;
  RowPassPlan plan;
  float2* partials = nullptr;  // [heads][chunks][64]: maximum and sum of exponentials, base 2
  const std::uint8_t* wanted = nullptr;
  int first_unit = 0;
  int rows = kPassRows;  // of a chunk, at most
  Chunks chunks = Chunks::kParts;
};

// Of a pass over the wanted heads, before it is known which of them come first and where partials go.
inline Arguments arguments_of(const Problem& problem, const RowPassPlan& plan,
                              const std::uint8_t* wanted) {
  Arguments arguments;
  arguments.problem = problem;
  arguments.plan = plan;
  arguments.wanted = wanted;
  arguments.chunks = chunks_of(problem.q, problem.k);
  return arguments;
}

// What every thread of a block knows about its work.
struct Task {
  Geometry geometry;
  int b = 0;
  int kv_head = 0;
  int first_in_group = 0;  // the block's head 0 among those of the KV head
  int first_key = 0;       // of range 0; may lie before the first key
  int range_step = 0;      // keys from one range to the next
  int steps = 0;
  std::uint32_t active = 0;  // bit: the block's head is to be estimated
};

// The row of the sums of the block's head `local`.
__device__ inline std::int64_t head_of_block(const Arguments& a, const Task& task, int local) {
  const int unit = static_cast<int>(blockIdx.y) / a.plan.head_groups;
  return static_cast<std::int64_t>(unit) * a.problem.group + task.first_in_group + local;
}

template <class Rows>
__device__ Task task_of_block(const Arguments& a) {
  static_assert(sizeof(Control<Rows>) + sizeof(Task) <= RowPassPlan::kFixedBytes);
  const Problem& problem = a.problem;
  Task task;
  const int unit = a.first_unit + static_cast<int>(blockIdx.y) / a.plan.head_groups;
  task.b = unit / problem.kv_heads;
  task.kv_head = unit % problem.kv_heads;
  task.geometry = sequence_geometry(problem, task.b);
  task.first_in_group = static_cast<int>(blockIdx.y) % a.plan.head_groups * a.plan.heads;
  // Ranges lie next to each other, or spread over all keys where the first ones are more work.
  task.range_step = Rows::kSpreadRanges ? a.plan.range * a.plan.chunks : a.plan.range;
  task.first_key =
      static_cast<int>(blockIdx.x) * a.plan.range * (Rows::kSpreadRanges ? 1 : kRanges) -
      Rows::keys_before(task.geometry);
  const int keys = min(max(task.geometry.kv_len - task.first_key, 0), a.plan.range);
  task.steps = (keys + kStepKeys - 1) / kStepKeys;
  const std::uint8_t* wanted = a.wanted + task.b * problem.q_heads + task.kv_head * problem.group;
  for (int g = 0; g < a.plan.heads; ++g) {
    const int head = task.first_in_group + g;
    if (head < problem.group && wanted[head] != 0) task.active |= 1U << g;
  }
  return task;
}

}  // namespace minference::cuda::row_pass

// What the thread blocks of the last-q estimate know about their work.
#pragma once

#include <cstdint>

#include "index/cuda/last_q.h"

namespace minference::cuda::last_q {

inline constexpr int kRanges = LastQPlan::kRanges;
inline constexpr int kProducerWarps = 2;
inline constexpr int kMaxHeads = LastQPlan::kMaxHeads;
inline constexpr int kMaxThreads = 128 * kMaxHeads + 32 * kProducerWarps;
inline constexpr int kStages = LastQPlan::kStages;
inline constexpr int kStepKeys = LastQPlan::kStepKeys;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

struct Control {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  float log_sums[kMaxHeads][kLastRows];  // base 2
  float maxima[kMaxHeads][kRanges][kLastRows];
  float2 partials[kMaxHeads][kRanges][kLastRows];  // of the warps
};

struct Arguments {
  Problem problem;
  LastQPlan plan;
  LastQSums sums;
  const std::uint8_t* wanted = nullptr;
  int first_unit = 0;
  bool aligned = false;
};

// What every thread of a block knows about its work.
struct Task {
  Geometry geometry;
  int b = 0;
  int kv_head = 0;
  int first_in_group = 0;  // the block's head 0 among those of the KV head
  int first_key = 0;       // of range 0
  int steps = 0;
  std::uint32_t active = 0;  // bit: the block's head is to be estimated
};

static_assert(sizeof(Control) + sizeof(Task) <= LastQPlan::kFixedBytes);

__device__ inline Task task_of_block(const Arguments& a) {
  const Problem& problem = a.problem;
  Task task;
  const int unit = a.first_unit + static_cast<int>(blockIdx.y) / a.plan.head_groups;
  task.b = unit / problem.kv_heads;
  task.kv_head = unit % problem.kv_heads;
  task.geometry = sequence_geometry(problem, task.b);
  task.first_in_group = static_cast<int>(blockIdx.y) % a.plan.head_groups * a.plan.heads;
  task.first_key = static_cast<int>(blockIdx.x) * kRanges * a.plan.range;
  const int keys = min(max(task.geometry.kv_len - task.first_key, 0), a.plan.range);
  task.steps = (keys + kStepKeys - 1) / kStepKeys;
  const std::uint8_t* wanted = a.wanted + task.b * problem.q_heads + task.kv_head * problem.group;
  for (int g = 0; g < a.plan.heads; ++g) {
    const int head = task.first_in_group + g;
    if (head < problem.group && wanted[head] != 0) task.active |= 1U << g;
  }
  return task;
}

}  // namespace minference::cuda::last_q

// How the last-q estimate is shared out among thread blocks, and the memory that it takes.
#include <algorithm>
#include <cstdint>

#include "attention/cuda/check.h"
#include "index/cuda/last_q.h"

namespace minference::cuda {
namespace {

constexpr int kPanelDims = 64;
constexpr int kPanelBytes = kLastRows * kPanelDims * 2;
constexpr int kStepKeys = LastQPlan::kStepKeys;

}  // namespace

LastQPlan plan_last_q(const Problem& problem) {
  // Sums of more heads than fit in so many bytes are made one after the other.
  constexpr std::int64_t kSumBytes = std::int64_t{48} << 20;
  constexpr int kMaxHeads = LastQPlan::kMaxHeads;
  constexpr int kFixedBytes = LastQPlan::kFixedBytes;
  LastQPlan plan;
  while (plan.panels * kPanelDims < problem.dim) plan.panels *= 2;
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kFixedBytes;
  const auto bytes = [&] {
    return 1024 + (plan.heads + LastQPlan::kStages) * plan.panels * kPanelBytes;
  };
  plan.heads = std::min(problem.group, kMaxHeads);
  while (plan.heads > 1 && bytes() > limit) --plan.heads;
  plan.head_groups = (problem.group + plan.heads - 1) / plan.heads;
  plan.heads = (problem.group + plan.head_groups - 1) / plan.head_groups;
  plan.shared_bytes = bytes();

  const std::int64_t kv_tokens = std::max(problem.kv_tokens, 1);
  plan.stride = (kv_tokens + 63) / 64 * 64;
  const std::int64_t units = static_cast<std::int64_t>(problem.batch) * problem.kv_heads;
  const std::int64_t unit_bytes = plan.stride * problem.group * 2 * sizeof(float);
  constexpr std::int64_t kMaxGrid = 65535;
  plan.units = static_cast<int>(std::clamp<std::int64_t>(
      kSumBytes / unit_bytes, 1, std::min(units, kMaxGrid / problem.group)));

  // So many chunks that the multiprocessors finish together.
  const int resident = std::clamp(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                                      (plan.shared_bytes + kFixedBytes + 1024),
                                  1, kMaxHeads / plan.heads);
  const std::int64_t slots = static_cast<std::int64_t>(resident) * multiprocessors();
  const std::int64_t blocks = static_cast<std::int64_t>(plan.units) * plan.head_groups;
  constexpr std::int64_t kBlockSteps = 12;  // what a thread block costs beside its keys, in steps
  const std::int64_t steps = (kv_tokens + kStepKeys - 1) / kStepKeys;
  std::int64_t best = INT64_MAX;
  const std::int64_t most =
      std::min<std::int64_t>((steps + LastQPlan::kRanges - 1) / LastQPlan::kRanges, 256);
  for (std::int64_t chunks = 1; chunks <= most; ++chunks) {
    const std::int64_t range =
        (steps + chunks * LastQPlan::kRanges - 1) / (chunks * LastQPlan::kRanges);
    const std::int64_t waves = (blocks * chunks + slots - 1) / slots;
    const std::int64_t cost = waves * (range + kBlockSteps);
    // Diagonals reach into one other range only.
    if (cost >= best || range * kStepKeys < kLastRows) continue;
    best = cost;
    plan.range = static_cast<int>(range) * kStepKeys;
  }
  if (best == INT64_MAX) plan.range = kLastRows;
  plan.chunks = static_cast<int>((kv_tokens + plan.range * LastQPlan::kRanges - 1) /
                                 (plan.range * LastQPlan::kRanges));
  return plan;
}

LastQSums allocate(const Problem& problem, const LastQPlan& plan, MemoryPieces& workspace) {
  const std::int64_t heads = static_cast<std::int64_t>(plan.units) * problem.group;
  LastQSums sums;
  sums.partials = workspace.take<float2>(heads * plan.chunks * kLastRows);
  sums.columns = workspace.take<float>(heads * plan.stride);
  sums.diagonals = workspace.take<float>(heads * plan.stride);
  sums.tails = workspace.take<float>(heads * plan.chunks * LastQPlan::kRanges * kLastRows);
  return sums;
}

}  // namespace minference::cuda

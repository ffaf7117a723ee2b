// How a row pass is shared out among thread blocks.
#include <algorithm>
#include <cstdint>

#include "attention/cuda/check.h"
#include "index/cuda/row_pass.h"

namespace minference::cuda {

RowPassPlan plan_row_pass(const Problem& problem, std::int64_t keys, std::int64_t units) {
  constexpr int kPanelDims = 64;
  constexpr int kPanelBytes = kPassRows * kPanelDims * 2;
  constexpr int kStepKeys = RowPassPlan::kStepKeys;
  constexpr int kMaxHeads = RowPassPlan::kMaxHeads;
  constexpr int kFixedBytes = RowPassPlan::kFixedBytes;
  RowPassPlan plan;
  while (plan.panels * kPanelDims < problem.dim) plan.panels *= 2;
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kFixedBytes;
  const auto bytes = [&] {
    return 1024 + (plan.heads + RowPassPlan::kStages) * plan.panels * kPanelBytes;
  };
  plan.heads = std::min(problem.group, kMaxHeads);
  while (plan.heads > 1 && bytes() > limit) --plan.heads;
  plan.head_groups = (problem.group + plan.heads - 1) / plan.heads;
  plan.heads = (problem.group + plan.head_groups - 1) / plan.head_groups;
  plan.shared_bytes = bytes();

  constexpr std::int64_t kMaxGrid = 65535;
  plan.units = static_cast<int>(
      std::clamp<std::int64_t>(units, 1,
                               std::min(static_cast<std::int64_t>(problem.batch) * problem.kv_heads,
                                        kMaxGrid / problem.group)));

  // So many chunks that the multiprocessors finish together.
  const int resident = std::clamp(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                                      (plan.shared_bytes + kFixedBytes + 1024),
                                  1, kMaxHeads / plan.heads);
  const std::int64_t slots = static_cast<std::int64_t>(resident) * multiprocessors();
  const std::int64_t blocks = static_cast<std::int64_t>(plan.units) * plan.head_groups;
  constexpr std::int64_t kBlockSteps = 12;  // what a thread block costs beside its keys, in steps
  const std::int64_t steps = (keys + kStepKeys - 1) / kStepKeys;
  std::int64_t best = INT64_MAX;
  const std::int64_t most =
      std::min<std::int64_t>((steps + RowPassPlan::kRanges - 1) / RowPassPlan::kRanges, 256);
  for (std::int64_t chunks = 1; chunks <= most; ++chunks) {
    const std::int64_t range =
        (steps + chunks * RowPassPlan::kRanges - 1) / (chunks * RowPassPlan::kRanges);
    const std::int64_t waves = (blocks * chunks + slots - 1) / slots;
    const std::int64_t cost = waves * (range + kBlockSteps);
    // Diagonals of 64 rows reach into one other range only.
    if (cost >= best || range * kStepKeys < kPassRows) continue;
    best = cost;
    plan.range = static_cast<int>(range) * kStepKeys;
  }
  if (best == INT64_MAX) plan.range = kPassRows;
  plan.chunks = static_cast<int>((keys + plan.range * RowPassPlan::kRanges - 1) /
                                 (plan.range * RowPassPlan::kRanges));
  return plan;
}

}  // namespace minference::cuda

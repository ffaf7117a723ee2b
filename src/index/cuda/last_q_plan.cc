// The memory that the last-q estimate takes.
#include <algorithm>
#include <cstdint>

#include "index/cuda/last_q.h"

namespace minference::cuda {

LastQPlan plan_last_q(const Problem& problem) {
  // Sums of more heads than fit in so many bytes are made one after the other.
  constexpr std::int64_t kSumBytes = std::int64_t{48} << 20;
  const std::int64_t kv_tokens = std::max(problem.kv_tokens, 1);
  const std::int64_t stride = (kv_tokens + 63) / 64 * 64;
  const std::int64_t unit_bytes = stride * problem.group * 2 * sizeof(float);
  LastQPlan plan{plan_row_pass(problem, kv_tokens, kSumBytes / unit_bytes)};
  plan.stride = stride;
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

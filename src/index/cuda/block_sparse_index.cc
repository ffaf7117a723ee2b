#include <algorithm>
#include <string>
#include <vector>

#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "index/cuda/head_plan.h"
#include "index/cuda/pooled.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

// A call, laid out in the workspace.
struct Layout {
  std::vector<HeadPlan> plans;
  IndexArrays arrays;
  PooledPlan pooled;

  Layout(const Problem& problem, std::int64_t top_k, MemoryPieces& workspace) {
    check_problem(problem);
    if (top_k < 1) {
      throw InvalidArgument("top_k is " + std::to_string(top_k) + "; legal: 1 or more");
    }
    for (int h = 0; h < problem.q_heads; ++h) {
      HeadPlan plan;
      plan.kind = HeadPattern::Kind::kBlockSparse;
      add_block_head(problem, std::max(top_k, kForcedBlocks), plan, arrays);
      plans.push_back(plan);
    }
    allocate(problem, workspace, arrays);
    pooled = plan_pooled(problem, workspace);
  }
};

}  // namespace

std::int64_t block_sparse_index_bytes(const Problem& problem, std::int64_t top_k) {
  MemoryPieces counted;
  const Layout layout(problem, top_k, counted);
  return counted.used();
}

DeviceIndex build_block_sparse_index(const Problem& problem, std::int64_t top_k,
                                     const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Layout layout(problem, top_k, given);
  check_workspace(workspace, given.used());
  upload_plans(layout.plans, layout.arrays.plans, stream);
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  build_pooled_heads(problem, layout.arrays, layout.pooled,
                     static_cast<int>(std::min(top_k, kMost)), stream);
  return layout.arrays.index(problem.batch);
}

}  // namespace minference::cuda

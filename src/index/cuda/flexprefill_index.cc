#include <cstdint>
#include <string>

#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "index/cuda/flexprefill.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

// A call, laid out in the workspace.
struct Layout {
  BlockBits bits;
  FlexPrefillPlan plan;

  Layout(const Problem& problem, const FlexPrefillRule& rule, MemoryPieces& workspace) {
    check_problem(problem);
    check_block_size(rule.block_size);
    check_share("gamma", rule.gamma);
    check_share("tau", rule.tau);
    if (rule.min_blocks < 1 || rule.max_blocks < rule.min_blocks) {
      throw InvalidArgument("the budgets are " + std::to_string(rule.min_blocks) + " and " +
                            std::to_string(rule.max_blocks) +
                            " blocks; legal: 1 or more, the second not below the first");
    }
    bits = plan_block_bits(problem, static_cast<int>(rule.block_size), workspace);
    plan = plan_flexprefill(problem, rule, workspace);
  }
};

}  // namespace

std::int64_t flexprefill_index_bytes(const Problem& problem, const FlexPrefillRule& rule) {
  MemoryPieces counted;
  const Layout layout(problem, rule, counted);
  return counted.used();
}

DeviceIndex build_flexprefill_index(const Problem& problem, const FlexPrefillRule& rule,
                                    const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Layout layout(problem, rule, given);
  check_workspace(workspace, given.used());
  build_flexprefill_heads(problem, layout.plan, rule, layout.bits, stream);
  return layout.bits.index();
}

}  // namespace minference::cuda

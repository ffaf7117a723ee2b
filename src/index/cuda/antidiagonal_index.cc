#include <cmath>
#include <cstdint>
#include <string>

#include "attention/cuda/problem.h"
#include "index/cuda/antidiagonal.h"
#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

// A call, laid out in the workspace.
struct Layout {
  BlockBits bits;
  AntidiagonalPlan plan;

  Layout(const Problem& problem, const AntidiagonalRule& rule, MemoryPieces& workspace) {
    check_problem(problem);
    check_block_size(rule.block_size);
    if (rule.stride < 1 || rule.stride > kRowBlock || kRowBlock % rule.stride != 0) {
      throw InvalidArgument("the stride is " + std::to_string(rule.stride) +
                            "; legal: divisors of " + std::to_string(kRowBlock));
    }
    check_share("the threshold", rule.threshold);
    if (!(rule.norm > 0 && std::isfinite(rule.norm))) {
      throw InvalidArgument("the norm is " + std::to_string(rule.norm) + "; legal: above 0");
    }
    bits = plan_block_bits(problem, static_cast<int>(rule.block_size), workspace);
    plan =
        plan_antidiagonals(problem, static_cast<int>(rule.block_size),
                           static_cast<int>(rule.stride), static_cast<float>(rule.norm), workspace);
  }
};

}  // namespace

std::int64_t antidiagonal_index_bytes(const Problem& problem, const AntidiagonalRule& rule) {
  MemoryPieces counted;
  const Layout layout(problem, rule, counted);
  return counted.used();
}

DeviceIndex build_antidiagonal_index(const Problem& problem, const AntidiagonalRule& rule,
                                     const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Layout layout(problem, rule, given);
  check_workspace(workspace, given.used());
  build_antidiagonal_heads(problem, layout.plan, rule.threshold, layout.bits, stream);
  return layout.bits.index();
}

}  // namespace minference::cuda

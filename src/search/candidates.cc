#include "search/candidates.h"

#include <algorithm>
#include <cmath>

#include "methods/head_rules.h"

namespace minference {
namespace {

// first, first * ratio, first * ratio^2, ... rounded, below `end`.
std::vector<std::int64_t> ladder(std::int64_t first, double ratio, std::int64_t end) {
  std::vector<std::int64_t> budgets;
  for (double value = static_cast<double>(first); std::llround(value) < end; value *= ratio) {
    budgets.push_back(std::llround(value));
  }
  return budgets;
}

}  // namespace

HeadPattern CandidateGrid::pattern(std::int64_t i) const {
  const auto columns = static_cast<std::int64_t>(slash.size());
  HeadPattern pattern;
  pattern.kind = kind;
  pattern.vertical = vertical[i / columns];
  pattern.slash = slash[i % columns];
  return pattern;
}

std::vector<CandidateGrid> candidate_grids(std::int64_t tokens) {
  using Kind = HeadPattern::Kind;
  // Half of the keys in gathered columns is no longer sparse in a useful way.
  const std::int64_t half = tokens / 2;
  CandidateGrid vertical_slash{Kind::kVerticalSlash, ladder(kForcedColumns, 1.4, half),
                               ladder(kForcedOffsets, 1.2, tokens)};
  // As many offsets as tokens: the head is dense.
  vertical_slash.slash.push_back(tokens);
  CandidateGrid a_shape{Kind::kAShape, ladder(4, 4.0, half), ladder(64, 1.2, tokens)};
  // The method ignores the numbers of this kind; the file repeats the defaults, as the reference's.
  CandidateGrid block_sparse{Kind::kBlockSparse, {HeadPattern{}.vertical}, {HeadPattern{}.slash}};
  return {vertical_slash, a_shape, block_sparse};
}

}  // namespace minference

// Candidate patterns of the search: per kind a grid of budgets whose kept sets are nested.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/pattern.h"

namespace minference {

// Every pair of a vertical and a slash budget. A larger budget of either keeps what a smaller one
// keeps, and a pattern keeps the union of what its two budgets keep.
struct CandidateGrid {
  HeadPattern::Kind kind = HeadPattern::Kind::kVerticalSlash;
  std::vector<std::int64_t> vertical;  // ascending
  std::vector<std::int64_t> slash;     // ascending

  std::int64_t size() const { return static_cast<std::int64_t>(vertical.size() * slash.size()); }
  // Candidate i has vertical budget i / slash.size() and slash budget i % slash.size().
  HeadPattern pattern(std::int64_t i) const;
};

// The grids for a prompt of this length, one per kind: budgets grow in equal ratios up to those that
// keep everything.
std::vector<CandidateGrid> candidate_grids(std::int64_t tokens);

}  // namespace minference

// Grid lines: the period and the phase at which the heavy columns of a visual segment lie.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "index/last_q.h"
#include "minference/segment.h"

namespace minference {

struct GridSearch {
  std::int64_t min_stride = 1;
  std::int64_t max_stride = 1;
  std::int64_t columns = 1;  // heaviest ones that are folded
};

// Strides that are tried on a region of a segment: `stride` alone where it is known (not 0), otherwise
// those from min_stride to max_stride of which the region holds four periods. Empty: last < first.
struct StrideRange {
  std::int64_t first = 1;
  std::int64_t last = 0;
};
StrideRange candidate_strides(TokenRange region, std::int64_t stride, const GridSearch& search);

// Lines of the segment whose tokens are `segment`: the heaviest of columns[region] are folded by
// each candidate stride, from the segment's first token on, and the stride and phase win whose sum
// exceeds that of an even spread, all mass / stride, by most; of equal ones the smaller stride, then
// the smaller phase. Candidates are those of candidate_strides(). None without a candidate or mass.
// columns: [kv_len] sums of an estimate. region: part of the segment.
// Source: MMInference (arXiv 2504.16083) §3.2, algorithm 1.
std::optional<GridLines> find_grid_lines(std::span<const float> columns, TokenRange segment,
                                         TokenRange region, std::int64_t stride,
                                         const GridSearch& search);

}  // namespace minference

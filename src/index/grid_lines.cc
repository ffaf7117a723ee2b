#include "index/grid_lines.h"

#include <algorithm>
#include <vector>

#include "index/top_k.h"

namespace minference {
namespace {

// Periods that a region must hold: fewer are no pattern.
constexpr std::int64_t kMinPeriods = 4;

}  // namespace

StrideRange candidate_strides(TokenRange region, std::int64_t stride, const GridSearch& search) {
  if (region.begin >= region.end) return {};
  if (stride > 0) return {stride, stride};
  return {search.min_stride,
          std::min(search.max_stride, (region.end - region.begin) / kMinPeriods)};
}

std::optional<GridLines> find_grid_lines(std::span<const float> columns, TokenRange segment,
                                         TokenRange region, std::int64_t stride,
                                         const GridSearch& search) {
  const StrideRange strides = candidate_strides(region, stride, search);
  if (strides.first > strides.last) return std::nullopt;

  // The light columns decide nothing, and are many.
  struct Column {
    std::int64_t token;  // counted from the segment's first
    double mass;
  };
  std::vector<Column> heavy;
  double total = 0.0;
  for (const std::int64_t i :
       top_k(columns.subspan(region.begin, region.end - region.begin), search.columns)) {
    const double mass = columns[region.begin + i];
    if (!(mass > 0.0)) continue;
    heavy.push_back({region.begin + i - segment.begin, mass});
    total += mass;
  }
  if (heavy.empty()) return std::nullopt;

  GridLines best{0, segment.end, 0};
  double most = 0.0;
  std::vector<double> folded;
  for (std::int64_t s = strides.first; s <= strides.last; ++s) {
    folded.assign(s, 0.0);
    for (const Column& column : heavy) folded[column.token % s] += column.mass;
    const auto phase = std::max_element(folded.begin(), folded.end());
    const double excess = *phase - total / static_cast<double>(s);
    if (best.stride == 0 || excess > most) {
      most = excess;
      best.stride = s;
      best.begin = segment.begin + (phase - folded.begin());
    }
  }
  return best;
}

}  // namespace minference

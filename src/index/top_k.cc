#include "index/top_k.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace minference {

std::vector<std::int64_t> top_k(std::span<const float> values, std::int64_t k) {
  const auto size = static_cast<std::int64_t>(values.size());
  k = std::clamp<std::int64_t>(k, 0, size);
  std::vector<std::int64_t> positions;
  positions.reserve(k);
  if (k == 0) return positions;

  const auto rank = [](float value) {
    return value == value ? value : -std::numeric_limits<float>::infinity();
  };
  std::vector<float> sorted(size);
  std::transform(values.begin(), values.end(), sorted.begin(), rank);
  std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
  const float threshold = sorted[k - 1];
  std::int64_t ties = k - std::count_if(sorted.begin(), sorted.begin() + k,
                                        [&](float value) { return value > threshold; });
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = rank(values[i]);
    if (value > threshold || (value == threshold && ties-- > 0)) positions.push_back(i);
  }
  return positions;
}

}  // namespace minference

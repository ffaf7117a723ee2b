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

std::vector<std::int64_t> smallest_cover(std::span<const double> mass,
                                         std::span<const std::int64_t> forced, double share,
                                         std::int64_t at_least, std::int64_t at_most) {
  struct Entry {
    double mass;
    std::int64_t position;
  };
  std::vector<Entry> heap(mass.size());
  double total = 0.0;
  for (std::size_t i = 0; i < mass.size(); ++i) {
    const double value = mass[i] == mass[i] ? mass[i] : 0.0;
    heap[i] = {value, static_cast<std::int64_t>(i)};
    total += value;
  }
  double covered = 0.0;
  std::vector<std::int64_t> positions(forced.begin(), forced.end());
  for (const std::int64_t position : forced) {
    covered += heap[position].mass;
    heap[position].position = -1;
  }
  std::erase_if(heap, [](const Entry& entry) { return entry.position < 0; });
  // A heap, because only what is taken has to be put in order.
  const auto after = [](const Entry& a, const Entry& b) {
    return a.mass < b.mass || (a.mass == b.mass && a.position > b.position);
  };
  std::make_heap(heap.begin(), heap.end(), after);
  auto count = static_cast<std::int64_t>(positions.size());
  while (!heap.empty() && count < at_most && (count < at_least || covered < share * total)) {
    std::pop_heap(heap.begin(), heap.end(), after);
    covered += heap.back().mass;
    positions.push_back(heap.back().position);
    heap.pop_back();
    ++count;
  }
  std::sort(positions.begin(), positions.end());
  return positions;
}

}  // namespace minference

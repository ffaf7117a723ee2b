#include "index/top_k.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

namespace minference {
namespace {

// A number that orders as the value does, NaN below everything. -0 and 0 are one value.
std::uint32_t rank(float value) {
  constexpr std::uint32_t kSign = 0x80000000U;
  if (value != value) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.0F);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

// The k-th largest of `ranks`, k from 1 to their number; reorders them. Counts them by their highest
// bits, then looks only at those that share the highest bits of the answer: of a hundred thousand
// unordered values, comparing ones mispredict every second branch.
std::uint32_t kth_largest(std::vector<std::uint32_t>& ranks, std::int64_t k) {
  constexpr int kBits = 11;
  std::size_t size = ranks.size();
  for (int shift = 32 - kBits;; shift = std::max(shift - kBits, 0)) {
    std::array<std::uint32_t, 1U << kBits> counts{};
    constexpr std::uint32_t kMask = (1U << kBits) - 1;
    for (std::size_t i = 0; i < size; ++i) ++counts[ranks[i] >> shift & kMask];
    std::uint32_t digit = kMask;
    for (; k > counts[digit]; --digit) k -= counts[digit];
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const std::uint32_t value = ranks[i];
      ranks[kept] = value;
      kept += (value >> shift & kMask) == digit ? 1 : 0;
    }
    size = kept;
    if (shift == 0) return ranks[0];
  }
}

}  // namespace

std::vector<std::int64_t> top_k(std::span<const float> values, std::int64_t k) {
  const auto size = static_cast<std::int64_t>(values.size());
  k = std::clamp<std::int64_t>(k, 0, size);
  std::vector<std::int64_t> positions;
  positions.reserve(k);
  if (k == 0) return positions;

  std::vector<std::uint32_t> ranks(size);
  std::transform(values.begin(), values.end(), ranks.begin(), rank);
  const std::uint32_t threshold = kth_largest(ranks, k);
  const auto above = std::count_if(values.begin(), values.end(),
                                   [&](float value) { return rank(value) > threshold; });
  std::int64_t ties = k - above;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::uint32_t value = rank(values[i]);
    if (value > threshold || (value == threshold && ties-- > 0)) positions.push_back(i);
  }
  return positions;
}

std::vector<std::int64_t> descending(std::span<const float> values) {
  // Radix sort, from the lowest digit of the inverted ranks on.
  struct Entry {
    std::uint32_t key;
    std::uint32_t position;
  };
  constexpr int kBits = 11;
  constexpr std::uint32_t kMask = (1U << kBits) - 1;
  std::vector<Entry> entries(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    entries[i] = {~rank(values[i]), static_cast<std::uint32_t>(i)};
  }
  std::vector<Entry> sorted(values.size());
  for (int shift = 0; shift < 32; shift += kBits) {
    std::array<std::uint32_t, 1U << kBits> begin{};
    for (const Entry& entry : entries) ++begin[entry.key >> shift & kMask];
    std::exclusive_scan(begin.begin(), begin.end(), begin.begin(), 0U);
    for (const Entry& entry : entries) sorted[begin[entry.key >> shift & kMask]++] = entry;
    std::swap(entries, sorted);
  }
  std::vector<std::int64_t> positions(values.size());
  std::transform(entries.begin(), entries.end(), positions.begin(),
                 [](const Entry& entry) { return std::int64_t{entry.position}; });
  return positions;
}

std::vector<std::int64_t> smallest_cover(std::span<const double> mass,
                                         std::span<const std::int64_t> forced, double share,
                                         std::int64_t at_least, std::int64_t at_most) {
  struct Entry {
    double mass;
    std::int64_t position;
  };
  std::vector<Entry> entries(mass.size());
  double total = 0.0;
  for (std::size_t i = 0; i < mass.size(); ++i) {
    const double value = mass[i] == mass[i] ? mass[i] : 0.0;
    entries[i] = {value, static_cast<std::int64_t>(i)};
    total += value;
  }
  double covered = 0.0;
  std::vector<std::int64_t> positions(forced.begin(), forced.end());
  for (const std::int64_t position : forced) {
    covered += entries[position].mass;
    entries[position].position = -1;
  }
  std::erase_if(entries, [](const Entry& entry) { return entry.position < 0; });
  const auto heavier = [](const Entry& a, const Entry& b) {
    return a.mass > b.mass || (a.mass == b.mass && a.position < b.position);
  };
  auto count = static_cast<std::int64_t>(positions.size());
  const auto lacks = [&](double added, std::int64_t more) {
    return count + more < at_most && (count + more < at_least || covered + added < share * total);
  };
  const auto take = [&](auto first, auto last) {
    for (; first != last; ++first) {
      covered += first->mass;
      positions.push_back(first->position);
      ++count;
    }
  };
  // Quickselect: the heavier half is taken as a whole while that is not enough, and only the half
  // where the cover ends is looked at further. Few enough entries are put in order.
  constexpr std::int64_t kFew = 16;
  auto first = entries.begin();
  auto last = entries.end();
  while (last - first > kFew && lacks(0.0, 0)) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, heavier);
    double upper = 0.0;
    for (auto entry = first; entry != middle; ++entry) upper += entry->mass;
    if (lacks(upper, middle - first)) {
      take(first, middle);
      first = middle;
    } else {
      last = middle;
    }
  }
  std::sort(first, last, heavier);
  for (; first != last && lacks(0.0, 0); ++first) take(first, first + 1);
  std::sort(positions.begin(), positions.end());
  return positions;
}

}  // namespace minference

// Positions of the largest values, by number, by their share, or in order; deterministic under ties.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace minference {

// Positions of the k largest of `values`, ascending; of equal values the earlier positions win.
// k is clamped to [0, values.size()]. NaN counts as smaller than everything else.
std::vector<std::int64_t> top_k(std::span<const float> values, std::int64_t k);

// All positions, those of larger values first; of equal values the earlier ones, NaN last.
std::vector<std::int64_t> descending(std::span<const float> values);

// The fewest positions whose mass reaches `share` of the total, ascending: those in `forced` (each
// once) and then the heaviest; of equal masses the earlier positions win. At least `at_least` and
// at most `at_most` positions, but the forced ones always. NaN counts as 0.
std::vector<std::int64_t> smallest_cover(std::span<const double> mass,
                                         std::span<const std::int64_t> forced, double share,
                                         std::int64_t at_least, std::int64_t at_most);

}  // namespace minference

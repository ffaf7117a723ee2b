// top_k: positions of the largest values, deterministic under ties.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace minference {

// Positions of the k largest of `values`, ascending; of equal values the earlier positions win.
// k is clamped to [0, values.size()]. NaN counts as smaller than everything else.
std::vector<std::int64_t> top_k(std::span<const float> values, std::int64_t k);

}  // namespace minference

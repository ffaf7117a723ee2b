// kept_pairs(): how many (row, key) pairs each head of an index computes.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Pairs for each (batch, query head), as Stats::kept_pairs counts them over all heads; null index:
// every pair that dense attention computes. `input` and `index` are those of a call of attention()
// that has succeeded; nothing is validated.
std::vector<std::int64_t> kept_pairs(const AttentionInput& input, const AttentionParams& params,
                                     const SparseIndex* index);

}  // namespace minference

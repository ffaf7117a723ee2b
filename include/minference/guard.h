// Guard: how much of the exact attention mass an index keeps, measured on sampled query rows.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Query rows that mass_recall() can sample.
inline constexpr std::int64_t kMaxGuardRows = 64;

// Mass kept by `index` for each (batch, query head): the mean over `rows` query rows, spread evenly
// over each sequence and always containing its last one, of the exact softmax probability that
// falls on keys which the index keeps. 1 for heads that are dense. Rows that see nothing are left
// out. Sinks take no part. Throws InvalidArgument as attention() does, and unless rows is 1 to
// kMaxGuardRows.
std::vector<double> mass_recall(const AttentionInput& input, const AttentionParams& params,
                                const SparseIndex& index, std::int64_t rows);

}  // namespace minference

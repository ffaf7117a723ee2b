// Guard: how much of the exact attention mass an index keeps, measured on sampled query rows.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Mass kept by `index` for each (batch, query head): the mean over `rows` query rows, spread evenly
// over each sequence and always containing its last one (64 at most, however many are asked for), of the exact softmax probability that
// falls on keys which the index keeps. 1 for heads that are dense. Rows that see nothing are left
// out. Sinks take no part. Throws InvalidArgument as attention() does, and when rows < 1.
std::vector<double> mass_recall(const AttentionInput& input, const AttentionParams& params,
                                const SparseIndex& index, std::int64_t rows);

}  // namespace minference

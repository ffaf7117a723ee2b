// The fp64 judge: attention computed in doubles over an explicit mask, for reading before speed.
//
// It shares no code with the executors. What is visible is decided here key by key from the
// definitions in attention.h and sparse_index.h, so that a wrong tile bound cannot hide.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Rows and keys of sequence b.
std::int64_t query_length(const AttentionInput& input, std::int64_t b);
std::int64_t key_length(const AttentionInput& input, std::int64_t b);

// Whether row `row` of sequence b may see key `key` at all: the explicit mask if there is one, the
// causal rule otherwise, and the sliding window.
bool allowed(const AttentionInput& input, const AttentionParams& params, std::int64_t b,
             std::int64_t row, std::int64_t key);

// [q_len][kv_len] bytes, 1 where query head h of sequence b sees the key: allowed() and, with an
// index, kept by it.
std::vector<std::uint8_t> explicit_mask(const AttentionInput& input, const AttentionParams& params,
                                        std::int64_t b, std::int64_t h, const SparseIndex* index);

// The scores of one row of query head h of sequence b against every key, scaled and soft-capped,
// in doubles: [kv_len]. Keys that the row does not see are included.
std::vector<double> row_scores(const AttentionInput& input, const AttentionParams& params,
                               std::int64_t b, std::int64_t h, std::int64_t row);

// The softmax of row_scores() over the keys that the row sees, without sinks: [kv_len], 0 for the
// others, and all 0 when it sees none.
std::vector<double> row_probabilities(const AttentionInput& input, const AttentionParams& params,
                                      std::int64_t b, std::int64_t h, std::int64_t row);

// Same contract as attention(), slow and in doubles. Does not validate its arguments. The Stats
// hold kept_pairs and causal_pairs, counted in the explicit masks.
Stats attention_reference(const AttentionInput& input, const AttentionParams& params,
                          const AttentionOutput& output, const SparseIndex* index = nullptr);

}  // namespace minference

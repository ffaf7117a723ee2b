// Rules that turn one head's estimate and budget into its HeadIndex; shared by several methods.
#pragma once

#include <cstdint>
#include <span>

#include "index/last_q.h"
#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Query rows of the last-q estimate, and what is kept whatever the estimate says: the first columns
// (attention sinks) and the nearest offsets (local window).
inline constexpr std::int64_t kLastQ = 64;
inline constexpr std::int64_t kForcedColumns = 30;
inline constexpr std::int64_t kForcedOffsets = 100;

// Keys 0 ... n_init - 1 and the n_local nearest keys, the query's own included; exact per row.
HeadIndex a_shape_head(std::int64_t n_init, std::int64_t n_local, std::int64_t kv_len);

// The `vertical` heaviest columns and `slash` heaviest offsets of the estimate. The forced sets
// count against the budgets, and a budget below its forced set is raised to it. Dense when the
// result would cover nearly all of the causal area anyway. q_len: rows of the chunk.
HeadIndex vertical_slash_head(const LastQEstimate& estimate, std::int64_t vertical,
                              std::int64_t slash, std::int64_t q_len);

// True when the budgets keep every key of a sequence of this length, so that no estimate is needed.
bool budgets_cover_all(std::int64_t vertical, std::int64_t slash, std::int64_t kv_len);

// Key blocks kept per row block by a head of the kind block_sparse: the reference system's number.
inline constexpr std::int64_t kBlockSparseTopK = 100;

// Writes the block_sparse head of every (sequence, query head) whose entry of wanted
// [batch * q_heads] is not 0 into `index`: per row block of kRowBlock rows the diagonal, block 0
// and the key blocks whose mean scores highest against the mean query, top_k in all where that is
// more.
void block_sparse_heads(const AttentionInput& input, const AttentionParams& params,
                        std::int64_t top_k, std::span<const std::uint8_t> wanted,
                        SparseIndex& index);

}  // namespace minference

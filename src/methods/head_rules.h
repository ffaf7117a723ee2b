// Rules that turn one head's estimate and budget into its HeadIndex; shared by several methods.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/visible_keys.h"
#include "index/last_q.h"
#include "minference/attention.h"
#include "minference/method.h"
#include "minference/sparse_index.h"

namespace minference {

// Query rows of the last-q estimate, and what is kept whatever the estimate says: the first columns
// (attention sinks) and the nearest offsets (local window).
inline constexpr std::int64_t kLastQ = 64;
inline constexpr std::int64_t kForcedColumns = 30;
inline constexpr std::int64_t kForcedOffsets = 100;

// Above this share of the causal area full tiles are cheaper than gathering and masking.
inline constexpr double kDensePays = 0.9;

// Largest value of an option that counts keys, offsets or rows.
inline constexpr double kMaxCount = 1e9;

// The value of an option whose values are whole numbers.
std::int64_t whole_option(const MethodOptions& options, const char* name);

// Keys 0 ... n_init - 1 and the offsets of `runs`, which ascend without overlap and may be empty;
// exact per row. Dense when no key is left out.
HeadIndex fixed_head(std::int64_t n_init, std::vector<OffsetRun> runs, std::int64_t kv_len);

// Keys 0 ... n_init - 1 and the n_local nearest keys, the query's own included; exact per row.
HeadIndex a_shape_head(std::int64_t n_init, std::int64_t n_local, std::int64_t kv_len);

// The index in which every head of a sequence is head_of(sequence, its number).
SparseIndex build_same_heads(
    const AttentionInput& input, const AttentionParams& params,
    const std::function<HeadIndex(const SequenceGeometry&, std::int64_t)>& head_of);

// Tri-shape: an A-shape whose last rows see every key. Its options n_init, n_local and n_last, with
// the given defaults, and its index. Throws InvalidArgument when context.rows_after is malformed.
std::vector<MethodOption> triangle_options(double n_init, double n_local, double n_last);
SparseIndex build_triangle(const AttentionInput& input, const AttentionParams& params,
                           const MethodOptions& options, const MethodContext& context);

// Rows of sequence b's prompt that later calls bring, as far as the caller says. Throws
// InvalidArgument when context.rows_after is malformed.
std::int64_t rows_after(const AttentionInput& input, const MethodContext& context, std::int64_t b);

// The first `forced` positions and then the heaviest others, max(budget, forced) in all, as far as
// there are as many; the heaviest ascend.
std::vector<std::int64_t> forced_and_heaviest(std::span<const float> sums, std::int64_t forced,
                                              std::int64_t budget);

// The offsets as runs of the diagonal form, joined where that adds no key to a full row block.
std::vector<OffsetRun> runs_of(std::span<const std::int64_t> offsets);

// The `vertical` heaviest columns and `slash` heaviest offsets of the estimate, in the diagonal
// form whatever they cover. The forced sets count against the budgets, and a budget below its
// forced set is raised to it.
HeadIndex vertical_slash_sets(const LastQEstimate& estimate, std::int64_t vertical,
                              std::int64_t slash);

// `head`, or a dense one when it would cover nearly all of the causal area of the chunk anyway.
// q_len: rows of the chunk.
HeadIndex dense_where_cheaper(HeadIndex head, std::int64_t q_len, std::int64_t kv_len);

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

// Builds a SparseIndex from one HeadPattern per query head.
#pragma once

#include <cstdint>
#include <functional>

#include "minference/attention.h"
#include "minference/method.h"
#include "minference/pattern.h"
#include "minference/sparse_index.h"

namespace minference {

// The index of every sequence and head; pattern_of(h) gives the pattern of query head h. One last-q
// estimate serves all vertical-slash heads; heads that need none pay for none. With a state in
// `context` it also serves later chunks, until `estimate_every` more rows have come. The numbers of a block_sparse
// pattern are ignored, as in the reference system: it keeps kBlockSparseTopK blocks.
SparseIndex build_from_patterns(const AttentionInput& input, const AttentionParams& params,
                                const std::function<HeadPattern(std::int64_t)>& pattern_of,
                                const MethodContext& context, std::int64_t estimate_every);

}  // namespace minference

// Last-q estimator in blocks: as last_q.h, with columns and offsets summed in blocks of keys.
//
// The block sums of a row need no second pass over the keys: they are taken relative to the running
// maximum and divided by the row's sum at the end.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "minference/attention.h"

namespace minference {

// Estimate of one query head. Sums run over the `rows` last query rows of the sequence.
struct LastQBlocks {
  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t rows = 0;
  // [key blocks]: attention mass of keys n * block_size on, and of offsets n * block_size on.
  std::span<const double> columns;
  std::span<const double> diagonals;
};

// Calls consume(estimate, thread) as estimate_last_q() does, of the last `block_size` rows, a multiple
// of kRowBlock; `thread` as in parallel_for(). Memory: the packed keys, at most 1 GiB at a time, and
// per thread 768 bytes a block of 64 or 128 keys.
// Source: FlexPrefill (arXiv 2502.20766) §4.
void estimate_last_q_blocks(const AttentionInput& input, const AttentionParams& params,
                            std::int64_t block_size, std::span<const std::uint8_t> wanted,
                            const std::function<void(const LastQBlocks&, int thread)>& consume);

}  // namespace minference

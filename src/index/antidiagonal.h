// Antidiagonal estimator: attention mass of blocks, from one sample of scores in `stride`.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "index/block_grid.h"
#include "minference/attention.h"

namespace minference {

struct AntidiagonalOptions {
  std::int64_t block_size = 128;  // a multiple of kRowBlock
  std::int64_t stride = 8;        // a divisor of kRowBlock
  double norm = 1.0;              // the scores are divided by it
};

// Estimate of one row block of one query head.
struct BlockMass {
  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t m = 0;            // row block
  std::span<const double> mass;  // [key blocks], 0 where no row of the block may see
};

// Cell (a, c) of a head stands for rows [a * stride, (a + 1) * stride) of the chunk and keys
// [c * stride, (c + 1) * stride); its score is the sum of the scores on its antidiagonal, phase p
// of the keys against phase stride - 1 - p of the rows, divided by stride and norm. A cell counts
// when one of its (row, key) pairs is visible. Each row of cells goes through a softmax, and the
// probabilities are summed per block.
//
// Calls consume(estimate) for every row block that exists of every sequence with keys, from worker
// threads, several at a time; the span is valid during the call. Memory: the packed keys, at most
// 1 GiB at a time, and per thread 64 floats and a double a key block.
// Source: XAttention (arXiv 2503.16428) §2.1.
void estimate_antidiagonals(const AttentionInput& input, const AttentionParams& params,
                            const AntidiagonalOptions& options,
                            const std::function<void(const BlockMass&)>& consume);

}  // namespace minference

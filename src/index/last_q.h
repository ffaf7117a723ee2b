// Last-q estimator: column and diagonal sums of the softmax of a chunk's last queries over all keys.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "minference/attention.h"

namespace minference {

// Estimate of one query head. Sums run over the `rows` last query rows of the sequence.
struct LastQEstimate {
  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t kv_len = 0;
  std::int64_t rows = 0;
  std::span<const float> columns;    // [kv_len], attention mass per key
  std::span<const float> diagonals;  // [kv_len], attention mass per offset (query - key position)
};

// Calls consume(estimate) for every (sequence, query head) that has queries and keys and whose entry
// of wanted [batch * q_heads] is not 0, from worker threads, several at a time. The spans are valid
// during the call. Memory: the packed keys, at most 1 GiB at a time, and two floats per key and
// thread; scores are computed twice instead of being kept.
// Source: MInference (arXiv 2407.02490) §3.2, algorithm 2.
void estimate_last_q(const AttentionInput& input, const AttentionParams& params,
                     std::int64_t last_q, std::span<const std::uint8_t> wanted,
                     const std::function<void(const LastQEstimate&)>& consume);

}  // namespace minference

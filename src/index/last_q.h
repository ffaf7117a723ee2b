// Last-q estimator: column and diagonal sums of the softmax of a chunk's last queries over all keys.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "minference/attention.h"
#include "minference/segment.h"

namespace minference {

// Estimate of one query head. Sums run over `rows` query rows of the sequence, its last ones unless a
// plan says otherwise.
struct LastQEstimate {
  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t kv_len = 0;
  std::int64_t rows = 0;
  std::span<const float> columns;    // [kv_len], attention mass per key
  std::span<const float> diagonals;  // [kv_len], attention mass per offset (query - key position)
  // [kv_len], as diagonals, of the keys that the plan sets apart and `diagonals` then lacks; or empty.
  std::span<const float> apart;
};

// Calls consume(estimate) for every (sequence, query head) that has queries and keys and whose entry
// of wanted [batch * q_heads] is not 0, from worker threads, several at a time. The spans are valid
// during the call. Memory: the packed keys, at most 1 GiB at a time, and two floats per key and
// thread; scores are computed twice instead of being kept.
// Source: MInference (arXiv 2407.02490) §3.2, algorithm 2.
void estimate_last_q(const AttentionInput& input, const AttentionParams& params,
                     std::int64_t last_q, std::span<const std::uint8_t> wanted,
                     const std::function<void(const LastQEstimate&)>& consume);

// What to estimate of the heads of one sequence.
struct EstimatePlan {
  std::vector<TokenRange> samples;  // rows of the chunk, each range by itself; none empty
  std::vector<TokenRange> apart;    // keys, ascending, whose diagonal sums are kept apart
};

// As estimate_last_q() with one plan a sequence in place of last_q; consume() gets the estimates of
// one head, one a sample. Sequences without samples are left out.
void estimate_samples(const AttentionInput& input, const AttentionParams& params,
                      std::span<const EstimatePlan> plans, std::span<const std::uint8_t> wanted,
                      const std::function<void(std::span<const LastQEstimate>)>& consume);

}  // namespace minference

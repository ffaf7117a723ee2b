// Guard: how much of the exact attention mass an index keeps, measured on sampled query rows, and
// exact attention for the heads that keep too little.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Query rows that mass_recall() can sample.
inline constexpr std::int64_t kMaxGuardRows = 64;
// A chunk has at least this many rows for each that the guard samples.
inline constexpr std::int64_t kGuardRowsPerSample = 128;

// Mass kept by `index` for each (batch, query head): the mean over `rows` query rows, spread evenly
// over each sequence and always containing its last one, of the exact softmax probability that
// falls on keys which the index keeps. 1 for heads that are dense. Rows that see nothing are left
// out. Sinks take no part. Tensors on a CUDA device are measured there, in AttentionParams::stream,
// and the call waits for it. Throws InvalidArgument as attention() does, and unless rows is 1 to
// kMaxGuardRows.
std::vector<double> mass_recall(const AttentionInput& input, const AttentionParams& params,
                                const SparseIndex& index, std::int64_t rows);

enum class GuardMode : std::uint8_t {
  kOff,
  kReport,   // measure
  kEnforce,  // and run a head dense, this chunk of it, where it keeps less than min_recall
};

struct GuardOptions {
  GuardMode mode = GuardMode::kOff;
  // Sampled per sequence and head, 1 to kMaxGuardRows; of short chunks at most one row in 128, and at
  // least one, so that the cost keeps its proportion.
  std::int64_t rows = 16;
  double min_recall = 0.90;  // 0 to 1
};

// Rows that guard() samples of a sequence with `q_len` rows in the chunk.
std::int64_t guard_rows(const GuardOptions& options, std::int64_t q_len);

// Throws InvalidArgument, naming value and range, unless the guard is off or its options are legal.
void validate(const GuardOptions& options);

// Measures `index` before it is used and, with kEnforce, replaces heads of it. Adds the recall that
// remains, the time and the replaced heads (a fallback) to `stats`. Throws InvalidArgument as
// mass_recall() does, and unless min_recall is 0 to 1.
void guard(const AttentionInput& input, const AttentionParams& params, const GuardOptions& options,
           SparseIndex& index, Stats& stats);

}  // namespace minference

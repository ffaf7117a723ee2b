// How much of their attention mass the heads of a layer may lose, and which rows lose none, on the CPU
// and on CUDA devices.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "minference/index_recipe.h"

namespace minference {

// The power of its loss by which a head's covering is judged.
inline constexpr int kLossPower = 3;
// Of what the longest prompts may lose, in the shortest.
inline constexpr double kShortLoss = 0.4;

// Share of the sampled rows' mass that heads may lose in the mean. Where prompts are short attention
// takes a small part of the time, and every key counts for more.
MINFERENCE_HOST_DEVICE inline double allowed_loss(const CoverageRule& rule, std::int64_t kv_len) {
  const double length = static_cast<double>(kv_len) / rule.long_keys;
  return (1 - rule.coverage) * (length < kShortLoss ? kShortLoss : (length > 1 ? 1.0 : length));
}

// Of a chunk that may be any part of its prompt, the rows whose exact attention costs next to nothing.
inline constexpr std::int64_t kExactShare = 32;
inline constexpr std::int64_t kFewestExactRows = 16;

// Rows at the end of a chunk that see every key: what a prompt asks stands at its end, and the tokens
// of the answer's place are read there and nowhere else, so that rows spread over a chunk do not tell
// where they lie. rows_after: rows of the prompt behind the chunk, or -1 where that is not known.
MINFERENCE_HOST_DEVICE inline std::int64_t exact_last_rows(const CoverageRule& rule,
                                                           std::int64_t q_len,
                                                           std::int64_t rows_after) {
  if (rows_after >= 0) return rows_after < rule.last_rows ? rule.last_rows - rows_after : 0;
  const std::int64_t share = q_len / kExactShare;
  const std::int64_t most = share < kFewestExactRows ? kFewestExactRows : share;
  return rule.last_rows < most ? rule.last_rows : most;
}

}  // namespace minference

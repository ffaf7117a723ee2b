// How much of their attention mass the heads of a layer may lose, on the CPU and on CUDA devices.
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

}  // namespace minference

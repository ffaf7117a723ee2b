// What the guard does with the recalls that it measured, on every device.
#pragma once

#include <span>

#include "minference/attention.h"
#include "minference/guard.h"

namespace minference {

// Whether a head of this recall has to become dense.
inline bool too_low(double recall, const GuardOptions& options) {
  return options.mode == GuardMode::kEnforce && recall < options.min_recall;
}

// Adds the recalls, one a head, to `stats`: 1 and a fallback for those that became dense.
void add_recalls(std::span<const double> recalls, const GuardOptions& options, Stats& stats);

}  // namespace minference

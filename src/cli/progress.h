// The progress of a pass over a prompt, as a status line.
#pragma once

#include <cstdint>
#include <optional>

#include "cli/status_line.h"
#include "core/stopwatch.h"

namespace minference::cli {

class Progress {
 public:
  // `total` tokens are to be done, for what `label` says; the clock starts now.
  explicit Progress(std::int64_t total, const char* label = "prefill");

  // Redraws: done/total, tokens/s, time left, kept share of the causal area if known.
  void update(std::int64_t done, std::optional<double> kept_fraction);

 private:
  std::int64_t total_;
  const char* label_;
  StatusLine line_;
  Stopwatch watch_;
};

}  // namespace minference::cli

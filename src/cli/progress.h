// A progress line on a terminal's stderr; silent when stderr is something else.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace minference::cli {

class Progress {
 public:
  // `total` tokens are to be done; the clock starts now.
  explicit Progress(std::int64_t total);
  // Removes the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Redraws: done/total, tokens/s, time left, kept share of the causal area if known.
  void update(std::int64_t done, std::optional<double> kept_fraction);

 private:
  std::int64_t total_;
  bool terminal_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace minference::cli

// measure(): minimum, median and maximum of repeated calls.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace minference::bench {

struct Timing {
  double minimum;
  double median;
  double maximum;
};

// Seconds of `repetitions` calls after one that warms up.
inline Timing measure(int repetitions, const std::function<void()>& run) {
  run();
  std::vector<double> seconds;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds.front(), seconds[seconds.size() / 2], seconds.back()};
}

}  // namespace minference::bench

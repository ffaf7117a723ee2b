// One run of this very program as a process of its own, so that no run meets another's memory.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

namespace minference::cli {

struct CellResult {
  int exit_code = 0;  // 128 + signal when a signal ended it
  std::string out;
  std::string err;
  double peak_mib = 0;  // largest resident set, mapped model file included
};

// Runs `minference` with these arguments and `input` on standard input. `wait` is called a few
// times a second meanwhile. When `stop` is set, the process is asked to stop, and Interrupted is
// thrown once it has ended. Throws RuntimeFailure when it cannot be started.
CellResult run_cell(const std::vector<std::string>& arguments, const std::string& input,
                    const std::atomic<bool>& stop, const std::function<void()>& wait);

}  // namespace minference::cli

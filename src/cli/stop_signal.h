// Ctrl-C: the first asks the running step to stop, the second ends the process at once.
#pragma once

#include <atomic>

namespace minference::cli {

// Installs the handler of SIGINT and SIGTERM and returns the flag that it sets.
const std::atomic<bool>& install_stop_signal();

}  // namespace minference::cli

#include "cli/stop_signal.h"

#include <unistd.h>
#include <csignal>

#include "cli/exit_codes.h"

namespace minference::cli {
namespace {

std::atomic<bool> stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may not lock");

extern "C" void on_stop_signal(int) {
  if (stop.exchange(true)) _exit(kInterrupted);
}

}  // namespace

const std::atomic<bool>& install_stop_signal() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return stop;
}

}  // namespace minference::cli

#include "cli/status_line.h"

#include <unistd.h>
#include <cstdio>

namespace minference::cli {
namespace {

constexpr char kClearLine[] = "\r\033[K";

}  // namespace

StatusLine::StatusLine() : terminal_(isatty(STDERR_FILENO) != 0) {}

StatusLine::~StatusLine() { clear(); }

void StatusLine::show(const std::string& text) {
  if (!terminal_) return;
  std::fputs((kClearLine + text).c_str(), stderr);
  std::fflush(stderr);
}

void StatusLine::clear() { show({}); }

}  // namespace minference::cli

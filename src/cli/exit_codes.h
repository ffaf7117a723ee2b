// Exit codes of the command line; docs/cli.md lists them.
#pragma once

namespace minference::cli {

inline constexpr int kOk = 0;
inline constexpr int kRuntimeFailure = 1;
inline constexpr int kBadInput = 2;
inline constexpr int kInterrupted = 130;  // 128 + SIGINT, as shells expect

}  // namespace minference::cli

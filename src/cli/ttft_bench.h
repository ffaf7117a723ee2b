// The table of times to first token: prompt length x attention, each cell a process of its own.
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace minference::cli {

// Shorter prompts than this measure nothing.
inline constexpr std::int64_t kMinTtftTokens = 64;

struct TtftOptions {
  std::string model;
  std::vector<std::string> methods{"stock", "dense", "auto"};  // name[:key=value...]
  std::string prompt_file;                                     // empty: built-in words
  std::string pattern;                                         // for the method minference
  std::string guard = "off";
  std::vector<std::int64_t> lengths;
  std::int64_t ubatch = 2048;
  std::int64_t threads = 0;  // 0: not given
  std::int64_t tokens = 8;   // of the answer
  std::int64_t repetitions = 1;
};

struct TtftReport {
  nlohmann::ordered_json json;
  std::int64_t cells = 0;
  std::int64_t failed = 0;
};

// Checks everything that can be checked beforehand, then measures. `table` hears the rows as they
// come, null for none; `output_path` gets the JSON after every row, empty for none, so that an
// interrupted bench leaves what it measured. A cell that fails is a row with its error, except that
// bad input which the first cell finds ends the bench. Throws InvalidArgument, Unsupported,
// IoError, Interrupted.
TtftReport run_ttft_bench(const TtftOptions& options, std::FILE* table,
                          const std::string& output_path);

}  // namespace minference::cli

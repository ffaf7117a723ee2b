// Options that the kernel tables share, and how lengths and levels are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "minference/isa.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace minference::bench {

struct KernelOptions {
  std::vector<std::string> tokens;  // lengths as they were given; empty: the table's own
  int threads = 0;                  // 0: the OpenMP default
  int repetitions = 5;
  std::vector<std::string> levels;  // empty: all that this machine has
  bool peer = true;
};

// What only kernel tables have: levels, and whether ggml is measured too.
std::vector<CLI::Option*> add_kernel_options(CLI::App& app, KernelOptions& options);
// Lengths, threads and repetitions, with the defaults of a kernel table.
void add_common_options(CLI::App& app, KernelOptions& options);

// "4k" -> 4096, "32000" -> 32000. Throws InvalidArgument naming the text and the range.
std::vector<std::int64_t> parse_lengths(const std::vector<std::string>& texts, std::int64_t min,
                                        std::int64_t max);

// The levels with these names, or all available ones without names. Throws InvalidArgument for an
// unknown name and Unsupported for a level that this machine cannot run.
std::vector<IsaLevel> levels_to_measure(const std::vector<std::string>& names);

}  // namespace minference::bench

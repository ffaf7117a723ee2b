// The table of matrix products: linear() per weight format, beside ggml's own product.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/options.h"

namespace minference::bench {

struct LinearBench {
  KernelOptions kernel;
  std::int64_t rows = 4096;
  std::int64_t cols = 4096;
  std::vector<std::string> types{"f16",  "bf16", "q4_0", "q4_1", "q5_0",
                                 "q8_0", "q4_K", "q5_K", "q6_K"};
};

// The options that only this table has.
std::vector<CLI::Option*> add_linear_options(CLI::App& app, LinearBench& bench);

// Measures products weight [rows, cols] x activations [tokens, cols], unpacking included, and
// returns the JSON report. ggml is measured in plain layout and, where it has one for the format,
// in its repacked layout. `table` hears the rows as they come; null for none. Results are judged
// against fp64 products of the unpacked weight on sampled rows. Throws std::runtime_error when one
// is wrong, InvalidArgument and Unsupported for bad options.
nlohmann::ordered_json run_linear_bench(const LinearBench& bench, std::FILE* table);

}  // namespace minference::bench

// The attention table: dense and sparse attention per kernel level, beside ggml's own kernel.
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/options.h"

namespace minference::bench {

struct AttentionBench {
  KernelOptions kernel;
  std::vector<std::int64_t> head_dims{64, 128};
  std::int64_t q_heads = 8;
  std::int64_t kv_heads = 2;
  std::vector<std::string> method_options{"vertical_size=500", "slash_size=700"};
  std::optional<double> kept_percent;           // also measure both forms of index at this density
  bool index_cost = false;                      // measure indices and the guard instead of kernels
  std::vector<std::int64_t> chunks{512, 2048};  // rows of a prefill step, for index_cost
};

// The options that only this table has.
std::vector<CLI::Option*> add_attention_options(CLI::App& app, AttentionBench& bench);

// Measures and returns the JSON report: machine, rows, and the cost of the index. `table` hears the
// rows as they come; null for none. Results are judged against the fp64 reference on sampled row
// blocks first. Throws std::runtime_error when one is wrong, InvalidArgument and Unsupported for
// bad options.
nlohmann::ordered_json run_attention_bench(const AttentionBench& bench, std::FILE* table);

}  // namespace minference::bench

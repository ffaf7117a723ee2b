// Options that several sub-commands share, and checks that name the legal values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "llama/engine.h"
#include "llama/plugin_config.h"

namespace minference::cli {

// Accept only a whole, respectively finite, number within the bounds.
CLI::Validator integer_between(std::int64_t min, std::int64_t max);
CLI::Validator number_between(double min, double max);

// Replaces the name of a shipped pattern file by its path.
CLI::Validator shipped_pattern();

// Model, attention, context and threads.
struct ModelOptions {
  std::string model;
  std::string attn = llama_host::default_method(false);
  std::vector<std::string> attn_opts;
  std::string pattern;
  std::string precision = "auto";
  std::string guard = "off";
  std::int64_t guard_rows = 16;
  double min_recall = 0.90;
  std::string linear = "1";
  std::int64_t context = 0;  // 0: not given
  std::int64_t ubatch = 2048;
  std::int64_t threads = 0;  // 0: not given

  // The attention part, with `attn_opts` parsed. Throws InvalidArgument.
  llama_host::AttentionOptions attention() const;
};

// Adds the options to a sub-command. The ones of attention have the MINFERENCE_* variables of the
// plug-in as their defaults.
void add_model_options(CLI::App& command, ModelOptions& options);

// Names of the attention methods, aliases in brackets, and "stock", separated by commas.
std::string method_names();

// Empty when a method, or "stock", has this name or alias; otherwise what is wrong, with the legal
// names.
std::string check_method(const std::string& name);

}  // namespace minference::cli

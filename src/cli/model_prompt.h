// A prompt on its way into a model: its options, the chat template, the context that it needs.
#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "llama/engine.h"

namespace minference::cli {

struct PromptOptions {
  std::string text;
  std::string file;  // "-" is standard input
  std::string system;
  bool no_chat = false;
};

void add_prompt_options(CLI::App& command, PromptOptions& options);

// Throws InvalidArgument when `command` was given neither a text nor a file, and what
// read_prompt_file() and check_prompt() throw.
std::string read_prompt(const CLI::App& command, const PromptOptions& options);

// The prompt in the model's chat template, unless that is not wanted or, with a warning, not there.
std::string render_prompt(const llama_host::Engine& engine, const PromptOptions& options,
                          const std::string& prompt);

// Tokens of context for a prompt and an answer, as far as the model was trained for them. Throws
// InvalidArgument naming both numbers when the prompt alone is longer.
std::int64_t context_for(const llama_host::Engine& engine, std::int64_t prompt_tokens,
                         std::int64_t answer_tokens);

}  // namespace minference::cli

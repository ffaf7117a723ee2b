// What sub-commands share that run prompts through a model: its set-up and warnings.
#pragma once

#include <atomic>
#include <string>

#include "cli/options.h"
#include "llama/engine.h"

namespace minference::cli {

// Throws InvalidArgument for an option of the method that is not key=value.
llama_host::EngineOptions engine_options(const ModelOptions& options,
                                         const std::atomic<bool>& stop);

void warn(const std::string& text);

}  // namespace minference::cli

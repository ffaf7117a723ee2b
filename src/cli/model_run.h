// What sub-commands share that run prompts through a model: its set-up, warnings, the plug-in's
// figures as JSON.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/options.h"
#include "llama/engine.h"

namespace minference::cli {

// Throws InvalidArgument for an option of the method that is not key=value.
llama_host::EngineOptions engine_options(const ModelOptions& options,
                                         const std::atomic<bool>& stop);

void warn(const std::string& text);

// Adds the figures of a prefill to an object; all null or empty with method stock.
void add_totals(nlohmann::ordered_json& json,
                const std::optional<llama_host::PluginTotals>& totals);

// 0 when no time was measured.
double tokens_per_second(std::int64_t tokens, double seconds);

}  // namespace minference::cli

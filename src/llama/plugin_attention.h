// Runs one flash attention operation of a ggml graph through attention().
#pragma once

#include "ggml.h"
#include "llama/plugin_config.h"
#include "llama/plugin_stats.h"

namespace minference::llama_host {

// Computes `op`, which route_operation() took, and adds what it did to `board`. Throws Error: the
// mask cannot be obeyed, or the pattern file does not fit the model.
void compute_flash_attention(ggml_tensor* op, const PluginConfig& config, int threads,
                             StatsBoard& board);

}  // namespace minference::llama_host

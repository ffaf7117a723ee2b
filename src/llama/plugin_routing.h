// Which operations of a graph the plug-in takes.
#pragma once

#include "ggml.h"
#include "llama/plugin_config.h"

namespace minference::llama_host {

enum class Route : std::uint8_t {
  kTaken,
  kOther,     // not prefill attention: another operation, few rows, few keys, or method stock
  kDeclined,  // prefill attention of a kind that the plug-in leaves to llama.cpp
};

struct RouteDecision {
  Route route = Route::kOther;
  const char* reason = nullptr;  // with kDeclined
};

// Decides by shapes and types only: the scheduler asks before any data exists.
RouteDecision route_operation(const ggml_tensor* op, const PluginConfig& config);

// The layer whose KV cache `k` is a view of, or -1 when it is not a view of a cache.
std::int64_t cache_layer(const ggml_tensor* k);

// scale, max_bias and soft-cap of a flash attention operation.
struct FlashAttentionParams {
  float scale = 0;
  float max_bias = 0;
  float soft_cap = 0;
};
FlashAttentionParams flash_attention_params(const ggml_tensor* op);

}  // namespace minference::llama_host

// Runs one flash attention operation of a ggml graph through attention().
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "ggml.h"
#include "llama/plugin_api.h"
#include "llama/plugin_config.h"
#include "llama/plugin_stats.h"
#include "minference/method.h"

namespace minference::llama_host {

// What methods remember of the sequences of one llama_context. A sequence is known by where in the
// KV cache its first key lies.
class PromptStates {
 public:
  // The state of a sequence of this layer, an empty one for a new sequence. Valid until the next
  // call. Of each layer only the sequences that were asked for last are kept.
  MethodState* find(std::int64_t layer, const void* first_key);

 private:
  struct Sequence {
    const void* first_key = nullptr;
    MethodState state;
  };
  std::map<std::int64_t, std::vector<Sequence>> layers_;  // the latest first
};

struct Observer {
  AttentionObserver function = nullptr;
  void* user = nullptr;
};

// What an operation itself does not say.
struct CallHints {
  int threads = 0;
  std::int64_t rows_after = -1;  // see plugin_api.h
  Observer observer;
  std::span<const Segment> segments;  // see plugin_api.h
};

// Computes `op`, which route_operation() took, and adds what it did to `board`. Throws Error: the
// mask cannot be obeyed, or the pattern file does not fit the model.
void compute_flash_attention(ggml_tensor* op, const PluginConfig& config, const CallHints& hints,
                             PromptStates& prompts, StatsBoard& board);

}  // namespace minference::llama_host

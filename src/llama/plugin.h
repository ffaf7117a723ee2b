// Start of the plug-in, common to its two ways in: loaded by ggml, or preloaded.
#pragma once

#include "llama/plugin_host.h"

namespace minference::llama_host {

// Checks the ggml that `host_address` belongs to, reads the environment and returns the registry
// object, or null after one line on stderr that says why not. Calling it again is harmless.
ggml_backend_reg_t start_plugin(const void* host_address) noexcept;

}  // namespace minference::llama_host

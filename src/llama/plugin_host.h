// The ggml that loaded the plug-in: its functions, looked up at run time.
//
// The plug-in links to no ggml. A preloaded library that did would bring its own copy into every
// process, and, where the host's ggml has the same soname, before the host's own.
#pragma once

#include <string>

#include "ggml-backend-impl.h"

namespace minference::llama_host {

// The functions of ggml that the plug-in calls.
struct HostApi {
  const char* (*version)() = nullptr;
  ggml_backend_buffer_type_t (*cpu_buffer_type)() = nullptr;
  ggml_backend_buffer_t (*cpu_buffer_from_ptr)(void*, size_t) = nullptr;
  bool (*buffer_type_is_host)(ggml_backend_buffer_type_t) = nullptr;
  int (*graph_node_count)(ggml_cgraph*) = nullptr;
  ggml_tensor* (*graph_node)(ggml_cgraph*, int) = nullptr;
  ggml_backend_reg_t (*find_registry)(const char*) = nullptr;
  void (*register_backend)(ggml_backend_reg_t) = nullptr;
};

// Fills `api` from the library that contains `address` and the libraries that it depends on.
// Returns empty, or the reason why that is impossible.
std::string find_host_api(const void* address, HostApi& api);

}  // namespace minference::llama_host

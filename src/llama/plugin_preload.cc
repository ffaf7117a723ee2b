// The way in by LD_PRELOAD, for hosts whose backends are linked in and which ignore
// GGML_BACKEND_PATH.
//
// A preloaded library comes before libllama in the search order, so the host's call of
// llama_backend_init() arrives here. It goes on to the real one first: a backend that is registered
// earlier would make libllama skip the loading of its own. In every other process, and when ggml
// loads the plug-in by path, nobody calls this function.
#include <dlfcn.h>

#include "llama/plugin.h"

extern "C" __attribute__((visibility("default"))) void llama_backend_init() {
  using minference::llama_host::HostApi;
  void* real = dlsym(RTLD_NEXT, "llama_backend_init");
  if (real == nullptr) return;
  reinterpret_cast<void (*)()>(real)();
  HostApi api;
  ggml_backend_reg_t registry = minference::llama_host::start_plugin(real);
  // Without effect when GGML_BACKEND_PATH has registered it in the meantime.
  if (registry != nullptr && minference::llama_host::find_host_api(real, api).empty()) {
    api.register_backend(registry);
  }
}

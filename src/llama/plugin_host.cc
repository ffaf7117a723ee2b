#include "llama/plugin_host.h"

#include <dlfcn.h>

namespace minference::llama_host {
namespace {

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::string find_host_api(const void* address, HostApi& api) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "the library that loads the plug-in cannot be identified";
  // NOLOAD: only a handle of what is loaded already. The main program has no such handle under its
  // own name, but is what a null name means.
  void* library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(nullptr, RTLD_NOW);
  const bool found = find(library, "ggml_version", api.version) &&
                     find(library, "ggml_backend_cpu_buffer_type", api.cpu_buffer_type) &&
                     find(library, "ggml_backend_cpu_buffer_from_ptr", api.cpu_buffer_from_ptr) &&
                     find(library, "ggml_backend_buft_is_host", api.buffer_type_is_host) &&
                     find(library, "ggml_graph_n_nodes", api.graph_node_count) &&
                     find(library, "ggml_graph_node", api.graph_node) &&
                     find(library, "ggml_backend_reg_by_name", api.find_registry) &&
                     find(library, "ggml_backend_register", api.register_backend);
  const char* missing = found ? nullptr : dlerror();
  // The handle only counts a reference to something that stays loaded as long as its caller runs.
  dlclose(library);
  if (found) return {};
  return std::string("the host does not export ggml's functions (") +
         (missing == nullptr ? info.dli_fname : missing) + ")";
}

}  // namespace minference::llama_host

#include "llama/plugin_loader.h"

#include <cstdlib>

#include "ggml-backend.h"
#include "llama.h"
#include "llama/failure.h"
#include "llama/ggml_guard.h"
#include "llama/install_paths.h"
#include "llama/log_capture.h"
#include "llama/plugin_config.h"

namespace minference::llama_host {

HostVersions host_versions() { return {MINFERENCE_GGML_VERSION, ggml_version(), llama_version()}; }

void start_backends(bool verbose) {
  // The plug-in is configured by function and not by the environment, which the command line has
  // read as the defaults of its options. GGML_BACKEND_PATH may load it as soon as in this function.
  for (const Variable& variable : plugin_variables()) unsetenv(variable.name);
  if (!verbose) setenv("MINFERENCE_LOG", "0", 1);
  capture_llama_log(verbose);
  const HostVersions versions = host_versions();
  const std::string refusal = check_ggml_version(versions.ggml_expected, versions.ggml_found);
  if (!refusal.empty()) throw Unsupported(refusal);
  clear_llama_complaint();
  llama_backend_init();
  if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
    throw RuntimeFailure(explain("llama.cpp has no CPU backend: " +
                                 path_beside_executable("libggml-cpu.so") + " is missing"));
  }
}

PluginFunctions load_plugin() {
  ggml_backend_reg_t registry = ggml_backend_reg_by_name(kRegistryName);
  if (registry == nullptr) {
    const std::string path = find_plugin();
    clear_llama_complaint();
    registry = ggml_backend_load(path.c_str());
    if (registry == nullptr) throw RuntimeFailure(explain("the plug-in did not load"));
  }
  const auto function = [&](const char* name) {
    void* address = ggml_backend_reg_get_proc_address(registry, name);
    if (address == nullptr) throw RuntimeFailure(std::string("the plug-in has no ") + name);
    return address;
  };
  PluginFunctions functions;
  functions.configure = reinterpret_cast<ConfigureFn>(function(kConfigureName));
  functions.stats = reinterpret_cast<StatsFn>(function(kStatsName));
  functions.reset_stats = reinterpret_cast<ResetStatsFn>(function(kResetStatsName));
  functions.set_rows_after = reinterpret_cast<SetRowsAfterFn>(function(kSetRowsAfterName));
  functions.set_segments = reinterpret_cast<SetSegmentsFn>(function(kSetSegmentsName));
  functions.set_observer = reinterpret_cast<SetObserverFn>(function(kSetObserverName));
  return functions;
}

}  // namespace minference::llama_host

// Starting llama.cpp's backends and our plug-in in this process.
#pragma once

#include <string>

#include "llama/plugin_api.h"

namespace minference::llama_host {

struct HostVersions {
  std::string ggml_expected;  // that this program was built for
  std::string ggml_found;     // that is loaded
  std::string llama_found;
};

HostVersions host_versions();

// Silences llama.cpp's log unless `verbose`, checks the version of ggml and loads its backends.
// Throws Unsupported when it is another version, RuntimeFailure when there is no CPU backend.
void start_backends(bool verbose);

struct PluginFunctions {
  ConfigureFn configure = nullptr;
  StatsFn stats = nullptr;
  ResetStatsFn reset_stats = nullptr;
  SetRowsAfterFn set_rows_after = nullptr;
  SetSegmentsFn set_segments = nullptr;
  SetObserverFn set_observer = nullptr;
};

// Loads the plug-in beside the executable, unless it is loaded already. The environment does not
// configure it. Throws IoError when it is missing, RuntimeFailure when it does not load.
PluginFunctions load_plugin();

}  // namespace minference::llama_host

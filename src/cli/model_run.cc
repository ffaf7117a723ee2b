#include "cli/model_run.h"

#include <cstdio>

namespace minference::cli {

llama_host::EngineOptions engine_options(const ModelOptions& options,
                                         const std::atomic<bool>& stop) {
  llama_host::EngineOptions result;
  result.model_path = options.model;
  result.attention = options.attention();
  result.ubatch = static_cast<int>(options.ubatch);
  result.threads = static_cast<int>(options.threads);
  result.stop = &stop;
  return result;
}

void warn(const std::string& text) {
  std::fprintf(stderr, "minference: warning: %s\n", text.c_str());
}

}  // namespace minference::cli

#include "llama/ggml_guard.h"

namespace minference::llama_host {

std::string check_ggml_version(const std::string& built, const std::string& running) {
  if (built == running) return {};
  return "minference was built for ggml " + built + " and cannot run inside ggml " + running +
         "; use the build for that version";
}

}  // namespace minference::llama_host

#include "llama/host.h"

#include <cstdlib>
#include <stdexcept>

namespace minference::testing {

Host& Host::get() {
  static Host host;
  return host;
}

Host::Host() {
  unsetenv("GGML_BACKEND_PATH");
  ggml_backend_load_all_from_path(MINFERENCE_TEST_BIN_DIR);
  cpu_ = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu_ == nullptr) throw std::runtime_error("no CPU backend in " MINFERENCE_TEST_BIN_DIR);
  ggml_backend_reg_t registry = ggml_backend_load(MINFERENCE_TEST_BIN_DIR "/libggml-minference.so");
  if (registry == nullptr) throw std::runtime_error("the plug-in did not load");
  plugin_ = ggml_backend_reg_dev_get(registry, 0);
  const auto function = [&](const char* name) {
    return ggml_backend_reg_get_proc_address(registry, name);
  };
  configure_ = reinterpret_cast<llama_host::ConfigureFn>(function(llama_host::kConfigureName));
  stats_ = reinterpret_cast<llama_host::StatsFn>(function(llama_host::kStatsName));
  reset_ = reinterpret_cast<llama_host::ResetStatsFn>(function(llama_host::kResetStatsName));
  set_rows_after_ =
      reinterpret_cast<llama_host::SetRowsAfterFn>(function(llama_host::kSetRowsAfterName));
}

std::string Host::configure(const nlohmann::json& config) {
  const char* reason = configure_(config.dump().c_str());
  reset_();
  return reason == nullptr ? "" : reason;
}

nlohmann::json Host::stats() const { return nlohmann::json::parse(stats_()); }

}  // namespace minference::testing

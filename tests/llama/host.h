// ggml, its CPU backend and our plug-in in the test's own process, loaded as llama.cpp's programs
// load them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "ggml-backend.h"
#include "llama/plugin_api.h"

namespace minference::testing {

class Host {
 public:
  static Host& get();

  ggml_backend_dev_t cpu_device() const { return cpu_; }
  ggml_backend_dev_t plugin_device() const { return plugin_; }

  // Replaces the plug-in's configuration and clears its totals. Empty, or why it was refused.
  std::string configure(const nlohmann::json& config);
  nlohmann::json stats() const;
  // Rows of the same prompt that follow those of the next computations.
  void set_rows_after(std::int64_t rows) { set_rows_after_(rows); }
  // Number of operations that the plug-in computed since configure().
  std::int64_t calls() const { return stats().at("calls").get<std::int64_t>(); }
  std::int64_t fallbacks(const std::string& reason) const {
    return stats().at("fallbacks").value(reason, std::int64_t{0});
  }

 private:
  Host();

  ggml_backend_dev_t cpu_ = nullptr;
  ggml_backend_dev_t plugin_ = nullptr;
  llama_host::ConfigureFn configure_ = nullptr;
  llama_host::StatsFn stats_ = nullptr;
  llama_host::ResetStatsFn reset_ = nullptr;
  llama_host::SetRowsAfterFn set_rows_after_ = nullptr;
};

}  // namespace minference::testing

#include "cli/model_run.h"

#include <cstdio>

namespace minference::cli {
namespace {

template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

}  // namespace

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

void add_totals(nlohmann::ordered_json& json,
                const std::optional<llama_host::PluginTotals>& totals) {
  for (const char* key : {"kept_fraction", "mass_recall", "index_seconds", "guard_seconds",
                          "attention_seconds", "linear_seconds", "isa"}) {
    json[key] = nullptr;
  }
  json["fallbacks"] = nlohmann::ordered_json::object();
  json["declined"] = nlohmann::ordered_json::array();
  if (!totals) return;
  json["kept_fraction"] = or_null(totals->kept_fraction);
  json["mass_recall"] = or_null(totals->mass_recall);
  json["index_seconds"] = totals->index_seconds;
  json["guard_seconds"] = totals->guard_seconds;
  json["attention_seconds"] = totals->attention_seconds;
  json["linear_seconds"] = totals->linear_seconds;
  json["isa"] = or_null(totals->isa);
  json["fallbacks"] = totals->fallbacks;
  json["declined"] = totals->declined;
}

double tokens_per_second(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
}

}  // namespace minference::cli

// Configuration of the ggml plug-in: one table of MINFERENCE_* variables, read from the environment
// or, for hosts of ours, from JSON.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "minference/attention.h"
#include "minference/method.h"
#include "minference/pattern.h"

namespace minference::llama_host {

// Method name that leaves every operation to llama.cpp.
inline constexpr char kStock[] = "stock";

// What the plug-in says on stderr; errors are always said.
enum class LogLevel : std::uint8_t { kQuiet, kLoadLine, kSummary };

// The method where none is named: a pattern file alone means the one that patterns are made for.
inline const char* default_method(bool with_pattern) {
  return with_pattern ? "minference" : "auto";
}

struct PluginConfig {
  std::string attn = default_method(false);
  const Method* method = nullptr;  // null: stock
  MethodOptions options;           // complete for `method`
  std::string pattern_path;
  std::shared_ptr<const PatternFile> patterns;
  std::int64_t min_rows = 64;
  std::int64_t min_kv = 512;
  Precision precision = Precision::kAuto;
  IsaLevel isa = IsaLevel::kGeneric;  // of matrix products; attention chooses by its types
  bool linear = true;
  GuardOptions guard;
  LogLevel log = LogLevel::kLoadLine;

  bool stock() const { return method == nullptr; }
};

// One variable, as docs/llama.md lists it.
struct Variable {
  const char* name;      // in the environment
  const char* key;       // in the JSON of minference_configure
  const char* legal;     // legal values, in words
  const char* fallback;  // the value when it is not set
};

// Every variable that the plug-in itself reads.
std::span<const Variable> plugin_variables();

// Both throw InvalidArgument, Unsupported or IoError naming the variable, its value and what is
// legal.
PluginConfig config_from_environment();
PluginConfig config_from_json(const std::string& json);

// Names of the methods that take a pattern file, joined by "or".
std::string pattern_method_names();
// Likewise of those that take modality segments.
std::string segment_method_names();

// The line that the plug-in prints when it is loaded.
std::string describe(const PluginConfig& config);

}  // namespace minference::llama_host

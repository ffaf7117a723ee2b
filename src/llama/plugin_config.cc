#include "llama/plugin_config.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "minference/error.h"
#include "minference/guard.h"
#include "minference/isa.h"

namespace minference::llama_host {
namespace {

enum VariableId : std::uint8_t {
  kAttn,
  kOptions,
  kPattern,
  kMinRows,
  kMinKv,
  kPrecision,
  kLinear,
  kGuard,
  kGuardRows,
  kMinRecall,
  kLog,
  kVariableCount
};

constexpr std::array<Variable, kVariableCount> kVariables{{
    {"MINFERENCE_ATTN", "attn", "a method of `minference list`, or stock", "auto"},
    {"MINFERENCE_ATTN_OPTS", "options", "key=value,key=value with the method's options",
     "the method's defaults"},
    {"MINFERENCE_PATTERN", "pattern",
     "path of a pattern file, for methods that take one; alone it means minference", "none"},
    {"MINFERENCE_MIN_ROWS", "min_rows", "an integer from 64 to 1048576", "64"},
    {"MINFERENCE_MIN_KV", "min_kv", "an integer from 1 to 1073741824", "512"},
    {"MINFERENCE_PRECISION", "precision", "auto, f32 or bf16", "auto"},
    {"MINFERENCE_LINEAR", "linear", "0 (llama.cpp's) or 1 (ours where they win)", "1"},
    {"MINFERENCE_GUARD", "guard", "off, report (measure) or enforce (and mend)", "off"},
    {"MINFERENCE_GUARD_ROWS", "guard_rows", "an integer from 1 to 64", "16"},
    {"MINFERENCE_MIN_RECALL", "min_recall", "a number from 0 to 1", "0.9"},
    {"MINFERENCE_LOG", "log", "0 (errors only) or 1 (load line and a table at exit)",
     "the load line only"},
}};

// Texts of the variables that were given, and how to name them in an error.
struct Given {
  std::map<VariableId, std::string> texts;
  const char* Variable::*naming;

  const std::string* find(VariableId id) const {
    const auto it = texts.find(id);
    return it == texts.end() ? nullptr : &it->second;
  }
  std::string name(VariableId id) const { return kVariables[id].*naming; }
  // Before a message that names value and range already. Whoever passes JSON knows its keys.
  std::string prefix(VariableId id) const {
    return naming == &Variable::name ? name(id) + ": " : "";
  }
  [[noreturn]] void refuse(VariableId id, const std::string& reason) const {
    throw InvalidArgument(name(id) + "=" + texts.at(id) + ": " + reason);
  }
  [[noreturn]] void refuse(VariableId id) const {
    refuse(id, std::string("expected ") + kVariables[id].legal);
  }
};

template <class Number>
void read_number(const Given& given, VariableId id, Number min, Number max, Number& value) {
  const std::string* text = given.find(id);
  if (text == nullptr) return;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || !(value >= min && value <= max)) given.refuse(id);
}

// Calls `body`, and names the variable of the environment in what it throws.
template <class Body>
auto named(const Given& given, VariableId id, Body&& body) {
  try {
    return body();
  } catch (const IoError& e) {
    throw IoError(given.prefix(id) + e.what());
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(given.prefix(id) + e.what());
  }
}

MethodOptions parse_options(const std::string& text) {
  MethodOptions options;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    parse_option(std::string_view(text).substr(begin, comma - begin), options);
    begin = comma + 1;
  }
  return options;
}

// A forced level that is unknown, or that this processor lacks, is refused here and not at the
// first prompt.
IsaLevel choose_level(const PluginConfig& config) {
  try {
    return choose_isa(config.precision != Precision::kF32);
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(std::string("MINFERENCE_FORCE_ISA: ") + e.what());
  }
}

PluginConfig build(const Given& given) {
  PluginConfig config;
  const std::string* attn = given.find(kAttn);
  config.attn = attn != nullptr ? *attn : default_method(given.find(kPattern) != nullptr);
  if (config.attn != kStock) {
    config.method = named(given, kAttn, [&] { return &find_method(config.attn); });
    config.attn = config.method->name();  // rather than an alias
  }
  const std::string* options = given.find(kOptions);
  if (config.stock()) {
    if (options != nullptr) given.refuse(kOptions, "stock has no options");
  } else {
    config.options = named(given, kOptions, [&] {
      return resolve_options(*config.method,
                             options == nullptr ? MethodOptions{} : parse_options(*options));
    });
  }
  if (const std::string* text = given.find(kPattern)) {
    if (config.stock() || !config.method->takes_patterns()) {
      given.refuse(kPattern, "a pattern file needs the method " + pattern_method_names() +
                                 ", not " + config.attn);
    }
    config.pattern_path = *text;
    config.patterns = named(given, kPattern, [&] {
      return std::make_shared<const PatternFile>(PatternFile::load(*text));
    });
  }
  read_number(given, kMinRows, kRowBlock, std::int64_t{1} << 20, config.min_rows);
  read_number(given, kMinKv, std::int64_t{1}, std::int64_t{1} << 30, config.min_kv);
  if (const std::string* text = given.find(kPrecision)) {
    if (*text == "f32") {
      config.precision = Precision::kF32;
    } else if (*text == "bf16") {
      config.precision = Precision::kBF16;
    } else if (*text != "auto") {
      given.refuse(kPrecision);
    }
  }
  if (const std::string* text = given.find(kLinear)) {
    if (*text != "0" && *text != "1") given.refuse(kLinear);
    config.linear = *text == "1";
  }
  if (const std::string* text = given.find(kGuard)) {
    if (*text == "report") {
      config.guard.mode = GuardMode::kReport;
    } else if (*text == "enforce") {
      config.guard.mode = GuardMode::kEnforce;
    } else if (*text != "off") {
      given.refuse(kGuard);
    }
  }
  read_number(given, kGuardRows, std::int64_t{1}, kMaxGuardRows, config.guard.rows);
  read_number(given, kMinRecall, 0.0, 1.0, config.guard.min_recall);
  if (const std::string* text = given.find(kLog)) {
    if (*text != "0" && *text != "1") given.refuse(kLog);
    config.log = *text == "0" ? LogLevel::kQuiet : LogLevel::kSummary;
  }
  config.isa = choose_level(config);
  return config;
}

std::string json_text(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_object()) return value.dump();
  std::string text;
  for (const auto& [key, number] : value.items()) {
    if (!text.empty()) text += ',';
    text += key + '=' + number.dump();
  }
  return text;
}

// Names of the methods with a property, joined by "or".
std::string names_of(bool (Method::*property)() const) {
  std::string names;
  for (const Method* method : attention_methods()) {
    if (!(method->*property)()) continue;
    names += names.empty() ? "" : " or ";
    names += method->name();
  }
  return names;
}

}  // namespace

std::span<const Variable> plugin_variables() { return kVariables; }

PluginConfig config_from_environment() {
  Given given{{}, &Variable::name};
  for (std::size_t i = 0; i < kVariables.size(); ++i) {
    const char* text = std::getenv(kVariables[i].name);
    if (text != nullptr && *text != '\0') given.texts[static_cast<VariableId>(i)] = text;
  }
  return build(given);
}

PluginConfig config_from_json(const std::string& json) {
  const nlohmann::json root = nlohmann::json::parse(json, nullptr, false);
  if (!root.is_object()) throw InvalidArgument("the configuration is not a JSON object: " + json);
  Given given{{}, &Variable::key};
  for (const auto& [key, value] : root.items()) {
    std::size_t i = 0;
    while (i < kVariables.size() && key != kVariables[i].key) ++i;
    if (i == kVariables.size()) throw InvalidArgument("unknown configuration key " + key);
    const std::string text = json_text(value);
    if (!text.empty()) given.texts[static_cast<VariableId>(i)] = text;
  }
  return build(given);
}

std::string pattern_method_names() { return names_of(&Method::takes_patterns); }

std::string segment_method_names() { return names_of(&Method::takes_segments); }

std::string describe(const PluginConfig& config) {
  if (config.stock()) return "attention stock: everything stays with llama.cpp";
  std::string line = "attention " + config.attn;
  if (config.patterns) line += " with patterns of " + config.pattern_path;
  line += " (kernels: ";
  line += isa_name(config.isa);
  line += ") for prompt batches of at least " + std::to_string(config.min_rows) +
          " tokens over at least " + std::to_string(config.min_kv) + " keys" +
          (config.linear ? ", and its matrix products" : "") +
          "; everything else stays with llama.cpp";
  return line;
}

}  // namespace minference::llama_host

#include "cli/options.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cli/shipped_patterns.h"
#include "core/format_number.h"
#include "llama/plugin_config.h"
#include "minference/error.h"
#include "minference/method.h"

namespace minference::cli {
namespace {

constexpr std::int64_t kMaxContext = 1 << 24;

template <class Number>
CLI::Validator between(Number min, Number max, const char* kind) {
  const std::string text =
      format_number(static_cast<double>(min)) + " to " + format_number(static_cast<double>(max));
  const auto check = [min, max, kind, text](std::string& input) -> std::string {
    Number value{};
    const char* end = input.data() + input.size();
    const auto [stop, error] = std::from_chars(input.data(), end, value);
    if (error == std::errc() && stop == end && value >= min && value <= max) return {};
    return "'" + input + "' is not " + kind + " from " + text;
  };
  return CLI::Validator(check, text);
}

}  // namespace

CLI::Validator integer_between(std::int64_t min, std::int64_t max) {
  return between<std::int64_t>(min, max, "an integer");
}

CLI::Validator number_between(double min, double max) {
  // NaN fails both comparisons of the check and so is refused.
  return between<double>(min, max, "a number");
}

CLI::Validator shipped_pattern() {
  const auto replace = [](std::string& input) -> std::string {
    input = find_pattern(input);
    std::error_code ignored;
    if (input.empty() || std::filesystem::exists(input, ignored)) return {};
    std::string names;
    for (const std::string& name : shipped_patterns()) names += (names.empty() ? "" : ", ") + name;
    return "'" + input + "' is neither a file nor the name of a shipped pattern: " + names;
  };
  return CLI::Validator(replace, "");
}

std::string method_names() { return attention_method_names() + ", " + llama_host::kStock; }

std::string check_method(const std::string& name) {
  if (name == llama_host::kStock) return {};
  try {
    find_method(name);
    return {};
  } catch (const InvalidArgument&) {
    return "unknown method '" + name + "', expected one of " + method_names();
  }
}

llama_host::AttentionOptions ModelOptions::attention() const {
  llama_host::AttentionOptions result;
  result.attn = attn;
  for (const std::string& option : attn_opts) parse_option(option, result.options);
  result.pattern = pattern;
  result.precision = precision;
  result.guard = guard;
  result.guard_rows = guard_rows;
  result.min_recall = min_recall;
  result.linear = linear;
  return result;
}

void add_model_options(CLI::App& command, ModelOptions& options) {
  command.add_option("-m,--model", options.model, "Model file (GGUF)")->required();
  command.add_option("--attn", options.attn, "Attention method: " + method_names())
      ->check(CLI::Validator([](std::string& name) { return check_method(name); }, ""))
      ->envname("MINFERENCE_ATTN")
      ->capture_default_str();
  command
      .add_option("--attn-opt", options.attn_opts,
                  "Option of the method as key=value; may be repeated (`minference list` has them)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->envname("MINFERENCE_ATTN_OPTS");
  command
      .add_option(
          "--pattern", options.pattern,
          "Pattern file (JSON), or the name of a shipped one (`minference list` has them), for\n"
          "the method " +
              llama_host::pattern_method_names() + "; without --attn: minference")
      ->transform(shipped_pattern())
      ->envname("MINFERENCE_PATTERN");
  command.parse_complete_callback([&command, &options] {
    if (command.count("--attn") == 0) {
      options.attn = llama_host::default_method(!options.pattern.empty());
    }
  });
  command.add_option("--precision", options.precision, "Products in auto, f32 or bf16")
      ->check(CLI::IsMember({"auto", "f32", "bf16"}))
      ->envname("MINFERENCE_PRECISION")
      ->capture_default_str();
  command
      .add_option("--guard", options.guard,
                  "report: measure on sampled rows how much attention mass is kept; enforce: and\n"
                  "run heads exactly that keep less than --min-recall; off")
      ->check(CLI::IsMember({"off", "report", "enforce"}))
      ->envname("MINFERENCE_GUARD")
      ->capture_default_str();
  command
      .add_option("--guard-rows", options.guard_rows,
                  "Rows that the guard samples per head and prefill step")
      ->check(integer_between(1, kMaxGuardRows))
      ->envname("MINFERENCE_GUARD_ROWS")
      ->capture_default_str();
  command
      .add_option("--min-recall", options.min_recall,
                  "Share of the attention mass that --guard enforce asks of every head")
      ->check(number_between(0.0, 1.0))
      ->envname("MINFERENCE_MIN_RECALL")
      ->capture_default_str();
  command
      .add_option("--linear", options.linear,
                  "1: prompts' matrix products on our kernels where these win; 0: llama.cpp's")
      ->check(CLI::IsMember({"0", "1"}))
      ->envname("MINFERENCE_LINEAR")
      ->capture_default_str();
  command
      .add_option("-c,--ctx", options.context,
                  "Context size in tokens, which llama.cpp rounds up to multiples of "
                  "256\n(default: as needed)")
      ->check(integer_between(1, kMaxContext));
  command.add_option("--ubatch", options.ubatch, "Tokens of a prefill step")
      ->check(integer_between(kRowBlock, 16384))
      ->capture_default_str();
  command.add_option("-t,--threads", options.threads, "Threads (default: one per core)")
      ->check(integer_between(1, 512));
}

}  // namespace minference::cli

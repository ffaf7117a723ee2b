#include "bench/options.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include <CLI/CLI.hpp>

#include "minference/error.h"

namespace minference::bench {
namespace {

constexpr std::int64_t kKilo = 1024;

}  // namespace

std::vector<CLI::Option*> add_kernel_options(CLI::App& app, KernelOptions& options) {
  return {app.add_option("--isa", options.levels, "Kernel levels (default: all available)")
              ->delimiter(','),
          app.add_flag("!--no-peer", options.peer, "Leave ggml's own kernel out")};
}

void add_common_options(CLI::App& app, KernelOptions& options) {
  app.add_option("-p,--tokens", options.tokens, "Lengths, for example 8k,32000")->delimiter(',');
  app.add_option("-t,--threads", options.threads, "Threads, 0 is all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("-r,--repetitions", options.repetitions, "Timed calls after one that warms up")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
}

std::vector<std::int64_t> parse_lengths(const std::vector<std::string>& texts, std::int64_t min,
                                        std::int64_t max) {
  std::vector<std::int64_t> lengths;
  for (const std::string& text : texts) {
    std::string_view digits = text;
    const bool kilo = !digits.empty() && (digits.back() == 'k' || digits.back() == 'K');
    if (kilo) digits.remove_suffix(1);
    std::int64_t value = 0;
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value);
    // Compared before the product, which might wrap.
    const std::int64_t factor = kilo ? kKilo : 1;
    if (error != std::errc() || stop != end || value > max / factor || value * factor < min) {
      throw InvalidArgument("--tokens: '" + text + "' is not a length from " + std::to_string(min) +
                            " to " + std::to_string(max) + " tokens (k = 1024)");
    }
    lengths.push_back(value * factor);
  }
  return lengths;
}

std::vector<IsaLevel> levels_to_measure(const std::vector<std::string>& names) {
  std::vector<IsaLevel> available = available_isa_levels();
  if (names.empty()) return available;
  std::vector<IsaLevel> levels;
  for (const std::string& name : names) {
    const IsaLevel level = parse_isa(name);
    if (std::find(available.begin(), available.end(), level) == available.end()) {
      std::string legal;
      for (const IsaLevel other : available) {
        if (!legal.empty()) legal += ", ";
        legal += isa_name(other);
      }
      throw Unsupported("--isa " + name + ": this machine or build has only " + legal);
    }
    levels.push_back(level);
  }
  return levels;
}

}  // namespace minference::bench

// minference list: what works in this build.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/shipped_patterns.h"
#include "llama/plugin_config.h"
#include "minference/method.h"

namespace minference::cli {
namespace {

int list() {
  std::printf("attention methods (--attn):\n");
  for (const Method* method : attention_methods()) {
    std::printf("  %-18s %s\n", method->name(), method->summary());
    for (const char* alias : method->aliases()) {
      std::printf("    alias: %s\n", alias);
    }
    for (const MethodOption& option : method->options()) {
      std::printf("      %-16s %s (default %g; %s)\n", option.name.c_str(), option.help.c_str(),
                  option.default_value, legal_values(option).c_str());
    }
  }
  std::printf("  %-18s llama.cpp's own attention, untouched\n", llama_host::kStock);
  std::printf("\nmodels with shipped patterns (--pattern):\n");
  for (const std::string& name : shipped_patterns()) std::printf("  %s\n", name.c_str());
  std::printf(
      "  any other model: its own file (`minference search` makes one), or without --pattern the\n"
      "  default of the method minference for every head, vertical_slash (1000, 6096)\n");
  return kOk;
}

}  // namespace

void add_list(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("list", "Methods with their options, and shipped patterns");
  command->footer("Example:\n  minference list");
  command->callback([&exit_code] { exit_code = list(); });
}

}  // namespace minference::cli

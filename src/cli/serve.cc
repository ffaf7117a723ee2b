// minference serve: llama.cpp's own server with the plug-in in place.
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <memory>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "core/format_number.h"
#include "llama/install_paths.h"
#include "llama/model_file.h"
#include "llama/plugin_config.h"

namespace minference::cli {
namespace {

bool given(const std::vector<std::string>& arguments, std::initializer_list<const char*> names) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const std::string& argument) {
    return std::any_of(names.begin(), names.end(),
                       [&](const char* name) { return argument == name; });
  });
}

void set_environment(const char* name, const std::string& value) {
  if (value.empty()) {
    unsetenv(name);
  } else {
    setenv(name, value.c_str(), 1);
  }
}

// The plug-in reads these in the server's process.
void export_options(const ModelOptions& options) {
  set_environment("MINFERENCE_ATTN", options.attn);
  std::string attn_opts;
  for (const std::string& option : options.attn_opts) {
    if (!attn_opts.empty()) attn_opts += ',';
    attn_opts += option;
  }
  set_environment("MINFERENCE_ATTN_OPTS", attn_opts);
  set_environment("MINFERENCE_PATTERN", options.pattern);
  set_environment("MINFERENCE_PRECISION", options.precision);
  set_environment("MINFERENCE_GUARD", options.guard);
  set_environment("MINFERENCE_GUARD_ROWS", std::to_string(options.guard_rows));
  set_environment("MINFERENCE_MIN_RECALL", format_number(options.min_recall));
  set_environment("MINFERENCE_LINEAR", options.linear);
}

std::vector<std::string> server_arguments(const std::string& server, const ModelOptions& options,
                                          const std::vector<std::string>& passthrough) {
  std::vector<std::string> arguments = {server, "-m", options.model};
  const auto add = [&](const char* flag, const std::string& value) {
    arguments.insert(arguments.end(), {flag, value});
  };
  // Without flash attention there is no operation to take.
  if (!given(passthrough, {"-fa", "--flash-attn"})) add("-fa", "on");
  // llama.cpp's default of 512 would estimate an index four times as often.
  if (!given(passthrough, {"-b", "--batch-size"})) add("-b", std::to_string(options.ubatch));
  if (!given(passthrough, {"-ub", "--ubatch-size"})) add("-ub", std::to_string(options.ubatch));
  if (options.context > 0) add("-c", std::to_string(options.context));
  if (options.threads > 0) add("-t", std::to_string(options.threads));
  arguments.insert(arguments.end(), passthrough.begin(), passthrough.end());
  return arguments;
}

// Whether the user's last word on flash attention is no.
bool flash_attention_off(const std::vector<std::string>& passthrough) {
  bool off = false;
  for (std::size_t i = 0; i + 1 < passthrough.size(); ++i) {
    if (passthrough[i] == "-fa" || passthrough[i] == "--flash-attn")
      off = passthrough[i + 1] == "off";
  }
  return off;
}

int serve(const ModelOptions& options, const std::vector<std::string>& passthrough) {
  llama_host::check_model_file(options.model);
  const std::string server = llama_host::path_beside_executable("llama-server");
  std::error_code error;
  if (!std::filesystem::is_regular_file(server, error)) {
    throw IoError(server + ": no such file; `make tools` builds it");
  }
  export_options(options);
  // Refuses now what the plug-in would refuse inside the server.
  const bool stock = llama_host::config_from_environment().stock();
  if (stock) {
    unsetenv("GGML_BACKEND_PATH");
  } else {
    set_environment("GGML_BACKEND_PATH", llama_host::find_plugin());
    if (flash_attention_off(passthrough)) {
      std::fprintf(stderr, "minference: warning: -fa off leaves nothing for --attn %s\n",
                   options.attn.c_str());
    }
  }
  std::vector<std::string> arguments = server_arguments(server, options, passthrough);
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(server.c_str(), argv.data());
  throw IoError(server + ": " + std::strerror(errno));
}

}  // namespace

void add_serve(CLI::App& app, const std::vector<std::string>& passthrough, int& exit_code) {
  auto options = std::make_shared<ModelOptions>();
  CLI::App* command =
      app.add_subcommand("serve", "OpenAI-compatible HTTP: llama.cpp's server with our attention");
  add_model_options(*command, *options);
  command->footer(
      "Everything after -- goes to llama-server unchanged (`llama-server --help` lists it).\n"
      "Examples:\n"
      "  minference serve -m model.gguf\n"
      "  minference serve -m model.gguf --attn vertical_slash -c 65536 -- --port 8081 -np 4");
  command->callback(
      [options, &passthrough, &exit_code] { exit_code = serve(*options, passthrough); });
}

}  // namespace minference::cli

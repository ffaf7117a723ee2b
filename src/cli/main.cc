// minference: the command line. Parses, runs one sub-command, turns exceptions into one line and an
// exit code.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "llama/failure.h"
#include "minference/error.h"
#include "minference/version.h"

namespace minference::cli {
namespace {

int fail(int exit_code, const std::string& message) {
  std::string line = message;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fprintf(stderr, "minference: error: %s\n", line.c_str());
  return exit_code;
}

// Cuts everything after the first "--" off `arguments`: it is not ours to parse.
std::vector<std::string> take_passthrough(std::vector<std::string>& arguments) {
  for (auto it = arguments.begin(); it != arguments.end(); ++it) {
    if (*it != "--") continue;
    std::vector<std::string> rest(it + 1, arguments.end());
    arguments.erase(it, arguments.end());
    return rest;
  }
  return {};
}

// CLI11 would only say that a sub-command is missing.
void check_command(const CLI::App& app, const std::string& word) {
  if (word.empty() || word.front() == '-') return;
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == word) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  throw InvalidArgument("unknown command '" + word + "', expected one of " + names);
}

int parse_and_run(std::vector<std::string> arguments) {
  const std::vector<std::string> passthrough = take_passthrough(arguments);
  int exit_code = kOk;
  CLI::App app{"Dynamic sparse attention for long prompts, inside llama.cpp", "minference"};
  app.set_version_flag("--version", std::string("minference ") + version());
  app.footer(
      "Exit codes: 0 done, 1 failure at run time, 2 bad input, 130 interrupted.\n"
      "`minference COMMAND --help` explains a command.");
  app.require_subcommand(1);
  add_run(app, exit_code);
  add_serve(app, passthrough, exit_code);
  add_bench(app, exit_code);
  add_perplexity(app, exit_code);
  add_explain(app, exit_code);
  add_search(app, exit_code);
  add_doctor(app, exit_code);
  add_list(app, exit_code);
  if (!passthrough.empty() && (arguments.empty() || arguments.front() != "serve")) {
    return fail(kBadInput, "arguments after -- are only for `minference serve`");
  }
  if (!arguments.empty()) check_command(app, arguments.front());
  // CLI11 wants them last to first.
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::Success& e) {
    app.exit(e);  // --help, --version
  } catch (const CLI::ParseError& e) {
    return fail(kBadInput, e.what());
  }
  return exit_code;
}

}  // namespace
}  // namespace minference::cli

int main(int argc, char** argv) {
  using namespace minference;
  using namespace minference::cli;
  int exit_code = kRuntimeFailure;
  try {
    exit_code = parse_and_run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const llama_host::Interrupted&) {
    return kInterrupted;
  } catch (const llama_host::RuntimeFailure& e) {
    return fail(kRuntimeFailure, e.what());
  } catch (const Error& e) {
    return fail(kBadInput, e.what());
  } catch (const std::exception& e) {
    return fail(kRuntimeFailure, e.what());
  }
  // A full disk or a closed pipe shows only now.
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return fail(kBadInput, std::string("cannot write to standard output: ") + std::strerror(errno));
  }
  return exit_code;
}

// The sub-commands. Each function adds one to `app`; when it is the one that the user gave, parsing
// runs it and leaves its exit code in `exit_code`. What it throws passes through the parser.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace minference::cli {

void add_run(CLI::App& app, int& exit_code);
// `passthrough` is what followed "--" on the command line; it must outlive the parsing.
void add_serve(CLI::App& app, const std::vector<std::string>& passthrough, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_perplexity(CLI::App& app, int& exit_code);
void add_explain(CLI::App& app, int& exit_code);
void add_search(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_list(CLI::App& app, int& exit_code);

}  // namespace minference::cli

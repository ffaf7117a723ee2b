// Running a program in a test: arguments, environment, standard streams, a time limit.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace minference::testing {

struct ProcessResult {
  int exit_code = -1;  // 128 + signal when a signal ended it
  bool timed_out = false;
  std::string out;
  std::string err;
  double seconds = 0;
};

struct ProcessOptions {
  // Added to this process's environment; an empty value removes the variable.
  std::map<std::string, std::string> environment = {};
  std::string input = {};        // standard input
  std::string output_path = {};  // standard output goes there instead of into ProcessResult::out
  double timeout_seconds = 120;
  // After this many seconds SIGINT is sent (0: never).
  double interrupt_after_seconds = 0;
};

ProcessResult run_process(const std::vector<std::string>& arguments,
                          const ProcessOptions& options = {});

// A file of its own for the running test with this content; deleted at exit.
std::string temporary_file(const std::string& name, const std::string& content);

}  // namespace minference::testing

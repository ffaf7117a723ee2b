// The built command line in tests.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/process.h"

namespace minference::testing {

// Runs `minference` with these arguments and without MINFERENCE_* variables of the caller's.
inline ProcessResult run_cli(std::vector<std::string> arguments, ProcessOptions options = {}) {
  arguments.insert(arguments.begin(), MINFERENCE_TEST_BIN_DIR "/minference");
  for (const char* name : {"ATTN", "ATTN_OPTS", "PATTERN", "PRECISION", "GUARD", "LOG"}) {
    options.environment.try_emplace(std::string("MINFERENCE_") + name, "");
  }
  options.environment.try_emplace("OMP_WAIT_POLICY", "passive");
  return run_process(arguments, options);
}

inline std::string cli_model() {
  return MINFERENCE_TEST_MODELS_DIR "/smollm2-135m-instruct-q4_1.gguf";
}

// The first `bytes` bytes of a real text.
inline std::string cli_text(std::size_t bytes) {
  std::ifstream file(MINFERENCE_TEST_MODELS_DIR "/text/othello_gut.txt", std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str().substr(0, bytes);
}

// One line on standard error that holds every one of `parts`, nothing on standard output, exit 2.
inline void expect_refused(const ProcessResult& result, const std::vector<std::string>& parts) {
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.find("minference: error: "), 0U) << result.err;
  EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  for (const std::string& part : parts) {
    EXPECT_NE(result.err.find(part), std::string::npos)
        << "'" << part << "' is not in: " << result.err;
  }
}

}  // namespace minference::testing

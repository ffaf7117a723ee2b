// Many prompts in one file: a JSON object a line.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace minference::cli {

inline constexpr std::int64_t kMaxAnswerTokens = 1 << 20;

struct PromptLine {
  std::string origin;         // "file line 3", for messages
  nlohmann::ordered_json id;  // whatever the line has; null without
  std::string prompt;
  // Empty: as for all prompts.
  std::optional<std::int64_t> tokens;  // most of the answer
  std::optional<std::string> system;
  std::optional<bool> chat;
};

// The lines of a file, or of standard input for "-"; blank ones are skipped. Throws IoError, and
// InvalidArgument that names the line and what is legal.
std::vector<PromptLine> read_prompt_lines(const std::string& path);

}  // namespace minference::cli

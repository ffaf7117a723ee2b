#include "cli/prompt_lines.h"

#include <sstream>

#include "cli/prompt_file.h"
#include "minference/error.h"

namespace minference::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& value, const std::string& name) {
  if (!value.is_string()) throw InvalidArgument(name + " must be a string");
  return value.get<std::string>();
}

void set_member(const std::string& key, const Json& value, const std::string& origin,
                PromptLine& line) {
  const std::string name = origin + ": " + key;
  if (key == "id") {
    line.id = value;
  } else if (key == "prompt") {
    line.prompt = text_of(value, name);
  } else if (key == "tokens") {
    const bool legal =
        value.is_number_integer() && value >= Json(1) && value <= Json(kMaxAnswerTokens);
    if (!legal) {
      throw InvalidArgument(name + " " + value.dump() + " is not an integer from 1 to " +
                            std::to_string(kMaxAnswerTokens));
    }
    line.tokens = value.get<std::int64_t>();
  } else if (key == "system") {
    line.system = text_of(value, name);
  } else if (key == "chat") {
    if (!value.is_boolean()) throw InvalidArgument(name + " must be true or false");
    line.chat = value.get<bool>();
  } else {
    throw InvalidArgument(origin + ": unknown key '" + key +
                          "', expected one of id, prompt, tokens, system, chat");
  }
}

PromptLine parse_line(const std::string& text, const std::string& origin) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) throw InvalidArgument(origin + " is not a JSON object");
  PromptLine line;
  line.origin = origin;
  for (const auto& [key, value] : json.items()) set_member(key, value, origin, line);
  if (!json.contains("prompt")) throw InvalidArgument(origin + " has no prompt");
  check_prompt(line.prompt, origin + ": the prompt");
  return line;
}

}  // namespace

std::vector<PromptLine> read_prompt_lines(const std::string& path) {
  const std::string name = path == "-" ? "standard input" : path;
  std::istringstream text(read_prompt_file(path));
  std::vector<PromptLine> lines;
  std::int64_t number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    lines.push_back(parse_line(line, name + " line " + std::to_string(number)));
  }
  if (lines.empty()) throw InvalidArgument(name + " holds no prompts");
  return lines;
}

}  // namespace minference::cli

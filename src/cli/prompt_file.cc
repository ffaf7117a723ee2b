#include "cli/prompt_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <system_error>

#include "llama/text.h"
#include "minference/error.h"

namespace minference::cli {
namespace {

std::string read_all(std::istream& stream) {
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

}  // namespace

std::string read_prompt_file(const std::string& path) {
  if (path == "-") {
    std::string text = read_all(std::cin);
    check_prompt(text, "the prompt on standard input");
    return text;
  }
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) throw IoError(path + ": is a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(path + ": " + std::strerror(errno));
  std::string text = read_all(file);
  check_prompt(text, path);
  return text;
}

void check_prompt(const std::string& text, const std::string& origin) {
  if (text.empty()) throw InvalidArgument(origin + " is empty");
  if (const auto offset = llama_host::find_invalid_utf8(text)) {
    throw InvalidArgument(origin + " is not valid UTF-8 at byte " + std::to_string(*offset));
  }
}

}  // namespace minference::cli

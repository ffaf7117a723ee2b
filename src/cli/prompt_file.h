// Prompts from files and standard input.
#pragma once

#include <string>

namespace minference::cli {

// The text of a file, or of standard input for "-". Throws IoError naming path and reason when it
// cannot be read, and what check_prompt() throws.
std::string read_prompt_file(const std::string& path);

// Throws InvalidArgument, beginning with `origin`, when the text is empty or not valid UTF-8.
void check_prompt(const std::string& text, const std::string& origin);

}  // namespace minference::cli

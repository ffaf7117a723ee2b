// Checks of a model file that llama.cpp would answer with an internal message.
#pragma once

#include <string>

namespace minference::llama_host {

// Throws IoError when `path` is missing, a directory or unreadable, InvalidArgument when it does
// not start as a GGUF file does.
void check_model_file(const std::string& path);

}  // namespace minference::llama_host

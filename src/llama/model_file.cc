#include "llama/model_file.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "minference/error.h"

namespace minference::llama_host {

void check_model_file(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    throw IoError(path + ": no such file");
  }
  if (error) throw IoError(path + ": " + error.message());
  if (std::filesystem::is_directory(status)) {
    throw IoError(path + ": is a directory, expected a GGUF file");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(path + ": " + std::strerror(errno));
  std::array<char, 4> magic{};
  file.read(magic.data(), magic.size());
  if (std::string_view(magic.data(), static_cast<std::size_t>(file.gcount())) != "GGUF") {
    throw InvalidArgument(path + ": not a GGUF file");
  }
}

}  // namespace minference::llama_host

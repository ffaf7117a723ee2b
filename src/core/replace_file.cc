#include "core/replace_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "minference/error.h"

namespace minference {
namespace {

// Of this process: two that replace a file at the same time must not write into one another's.
std::string temporary_path(const std::string& path) {
  return path + "." + std::to_string(getpid()) + ".tmp";
}

std::string reason() { return errno != 0 ? std::strerror(errno) : "unknown reason"; }

void write_temporary(const std::string& path, std::string_view content) {
  std::error_code ignored;
  // A folder, a device: renaming onto it would fail, or replace it.
  if (std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored)) {
    throw IoError("cannot write " + path + ": it is not a regular file");
  }
  const std::string temporary = temporary_path(path);
  errno = 0;
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (!file) {
    const std::string why = reason();
    std::filesystem::remove(temporary, ignored);
    throw IoError("cannot write " + path + ": " + why);
  }
}

}  // namespace

void replace_file(const std::string& path, std::string_view content) {
  write_temporary(path, content);
  std::error_code error;
  std::filesystem::rename(temporary_path(path), path, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary_path(path), ignored);
    throw IoError("cannot write " + path + ": " + error.message());
  }
}

void check_replaceable(const std::string& path) {
  write_temporary(path, {});
  std::error_code ignored;
  std::filesystem::remove(temporary_path(path), ignored);
}

}  // namespace minference

#include "llama/install_paths.h"

#include <filesystem>
#include <system_error>

#include "minference/error.h"

namespace minference::llama_host {
namespace fs = std::filesystem;

std::string path_beside_executable(const std::string& name) {
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (error) throw IoError("/proc/self/exe: " + error.message());
  return (executable.parent_path() / name).string();
}

std::string find_plugin() {
  std::string path = path_beside_executable(kPluginFile);
  std::error_code error;
  if (!fs::is_regular_file(path, error)) throw IoError("the plug-in is missing: " + path);
  return path;
}

}  // namespace minference::llama_host

#include "cli/shipped_patterns.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "llama/install_paths.h"

namespace minference::cli {
namespace fs = std::filesystem;

std::vector<std::string> shipped_patterns() {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator files(llama_host::path_beside_executable("patterns"), error);
  for (; !error && files != fs::directory_iterator(); files.increment(error)) {
    if (files->path().extension() == ".json") names.push_back(files->path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string find_pattern(const std::string& name_or_path) {
  const std::vector<std::string> names = shipped_patterns();
  if (!std::binary_search(names.begin(), names.end(), name_or_path)) return name_or_path;
  return llama_host::path_beside_executable("patterns/" + name_or_path + ".json");
}

}  // namespace minference::cli

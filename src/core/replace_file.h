// Files that are whole or not there: written beside their path, then renamed onto it.
#pragma once

#include <string>
#include <string_view>

namespace minference {

// Makes `path` a file with this content. Throws IoError naming path and reason; then `path` is what
// it was.
void replace_file(const std::string& path, std::string_view content);

// Throws IoError as replace_file() would; `path` and what it holds stay.
void check_replaceable(const std::string& path);

}  // namespace minference

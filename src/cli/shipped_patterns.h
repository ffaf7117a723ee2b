// Pattern files that come with the program, by the name of their model.
#pragma once

#include <string>
#include <vector>

namespace minference::cli {

// Names of the pattern files that lie beside the program, ascending.
std::vector<std::string> shipped_patterns();

// The path of a shipped pattern file with this name; any other text, a path, as it is.
std::string find_pattern(const std::string& name_or_path);

}  // namespace minference::cli

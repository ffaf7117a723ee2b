// Files of this installation: the plug-in and llama.cpp's programs lie beside our executable.
#pragma once

#include <string>

namespace minference::llama_host {

inline constexpr char kPluginFile[] = "libggml-minference.so";

// Path of `name` in the folder of the running executable, whether it exists or not. Symbolic links
// to the executable are followed first.
std::string path_beside_executable(const std::string& name);

// The plug-in. Throws IoError naming the path when it is not there.
std::string find_plugin();

}  // namespace minference::llama_host

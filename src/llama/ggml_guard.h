// Whether code built against one ggml may run inside another.
#pragma once

#include <string>

namespace minference::llama_host {

// Empty when what was built against ggml `built` may run inside ggml `running`, else the sentence
// that refuses. ggml lays its plug-in structures out anew without a new interface number, so only
// the very same version will do.
std::string check_ggml_version(const std::string& built, const std::string& running);

}  // namespace minference::llama_host

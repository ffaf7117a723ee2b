// llama.cpp's log: silenced, with its complaints kept to explain a failure.
#pragma once

#include <string>

namespace minference::llama_host {

// Routes the log of ggml, libllama and llama-common here. `verbose` passes it on to stderr as well.
void capture_llama_log(bool verbose);

// Forgets what was kept.
void clear_llama_complaint();

// The first error since then, without the name of the function that logged it; empty if none.
std::string llama_complaint();

// `what`, followed by the complaint when there is one.
std::string explain(const std::string& what);

}  // namespace minference::llama_host

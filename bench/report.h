// What every JSON report holds beside its rows: the machine that was measured.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace minference::bench {

// Processor, threads, chosen kernel level, versions of this library and of ggml (null in a build
// without llama.cpp), date.
nlohmann::ordered_json machine(int threads);

// Throws IoError naming path and reason, so that it can be asked before hours of measuring.
void check_writable(const std::string& path);
void write_report(const std::string& path, const nlohmann::ordered_json& report);

}  // namespace minference::bench

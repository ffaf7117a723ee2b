#include "bench/report.h"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>

#include "minference/error.h"
#include "minference/isa.h"
#include "minference/version.h"
#ifdef MINFERENCE_BENCH_GGML
#include "bench/ggml_peer.h"
#endif

namespace minference::bench {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &parts);
  return text;
}

std::ofstream open(const std::string& path, std::ios::openmode mode) {
  errno = 0;
  std::ofstream file(path, mode);
  if (!file) throw IoError(path + ": " + std::strerror(errno));
  return file;
}

}  // namespace

nlohmann::ordered_json machine(int threads) {
  nlohmann::ordered_json json;
  json["processor"] = processor();
  json["threads"] = threads;
  json["isa"] = isa_name(choose_isa(true));
  json["minference"] = version();
#ifdef MINFERENCE_BENCH_GGML
  json["ggml"] = ggml_library_version();
#else
  json["ggml"] = nullptr;
#endif
  json["date"] = today();
  return json;
}

void check_writable(const std::string& path) { open(path, std::ios::app); }

void write_report(const std::string& path, const nlohmann::ordered_json& report) {
  std::ofstream file = open(path, std::ios::trunc);
  file << report.dump(2) << '\n';
  file.flush();
  if (!file) throw IoError(path + ": " + std::strerror(errno));
}

}  // namespace minference::bench

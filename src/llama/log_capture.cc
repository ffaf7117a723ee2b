#include "llama/log_capture.h"

#include <cstdio>
#include <mutex>
#include <string_view>

#include "llama.h"
#include "log.h"

namespace minference::llama_host {
namespace {

struct Capture {
  std::mutex mutex;
  bool verbose = false;
  std::string complaint;
};

Capture& capture() {
  static Capture instance;
  return instance;
}

// "llama_model_load: error loading model: unknown ..." -> "unknown ..."
std::string strip_origin(std::string_view line) {
  constexpr std::string_view kLoading = "error loading model: ";
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.remove_suffix(1);
  const std::size_t loading = line.find(kLoading);
  if (loading != std::string_view::npos) {
    line.remove_prefix(loading + kLoading.size());
  } else {
    const std::size_t colon = line.find(": ");
    const std::size_t space = line.find(' ');
    if (colon != std::string_view::npos && colon < space) line.remove_prefix(colon + 2);
  }
  return std::string(line);
}

void on_log(ggml_log_level level, const char* text, void*) {
  Capture& state = capture();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.verbose) std::fputs(text, stderr);
  if (level == GGML_LOG_LEVEL_ERROR && state.complaint.empty()) {
    state.complaint = strip_origin(text);
  }
}

}  // namespace

void capture_llama_log(bool verbose) {
  {
    const std::lock_guard<std::mutex> lock(capture().mutex);
    capture().verbose = verbose;
  }
  llama_log_set(on_log, nullptr);
  // llama-common's own log has no callback; this level is below every message.
  if (!verbose) common_log_set_verbosity_thold(-1);
}

void clear_llama_complaint() {
  const std::lock_guard<std::mutex> lock(capture().mutex);
  capture().complaint.clear();
}

std::string llama_complaint() {
  const std::lock_guard<std::mutex> lock(capture().mutex);
  return capture().complaint;
}

std::string explain(const std::string& what) {
  const std::string complaint = llama_complaint();
  return complaint.empty() ? what : what + ": " + complaint;
}

}  // namespace minference::llama_host

// minference doctor: what this machine and this installation can do.
#include <cstdio>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/self_test.h"
#include "llama/install_paths.h"
#include "llama/plugin_loader.h"
#include "minference/cuda.h"
#include "minference/error.h"
#include "minference/isa.h"
#include "minference/version.h"

namespace minference::cli {
namespace {

std::string names(const std::vector<IsaLevel>& levels) {
  std::string text;
  for (const IsaLevel level : levels)
    text += (text.empty() ? "" : " ") + std::string(isa_name(level));
  return text;
}

bool report_kernels() {
  std::printf("kernels\n");
  std::printf("  compiled      %s\n", names(compiled_isa_levels()).c_str());
  std::printf("  usable here   %s\n", names(available_isa_levels()).c_str());
  std::printf("  chosen        %s for 16-bit inputs, %s for f32\n", isa_name(choose_isa(true)),
              isa_name(choose_isa(false)));
  bool passed = true;
  for (const IsaLevel level : available_isa_levels()) {
    const SelfTestResult result = self_test(level);
    std::printf("  self-test     %-12s %s, largest error %.1e (bound %.0e)\n", isa_name(level),
                result.passed() ? "ok" : "FAILED", result.max_error, result.bound);
    passed = passed && result.passed();
  }
  return passed;
}

// Loads what `run` would load; empty, or why that fails.
std::string try_plugin() {
  try {
    llama_host::start_backends(false);
    llama_host::load_plugin();
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

bool report_llama() {
  const llama_host::HostVersions versions = llama_host::host_versions();
  std::printf("llama.cpp\n");
  std::printf("  llama         %s\n", versions.llama_found.c_str());
  std::printf("  ggml          built for %s, found %s\n", versions.ggml_expected.c_str(),
              versions.ggml_found.c_str());
  std::printf("  plug-in       %s\n",
              llama_host::path_beside_executable(llama_host::kPluginFile).c_str());
  const std::string reason = try_plugin();
  std::printf("  loads         %s\n", reason.empty() ? "yes" : ("NO: " + reason).c_str());
  return reason.empty();
}

// That there is no CUDA is in order, and so is a device that is too old.
void report_cuda() {
  std::printf("CUDA\n");
  try {
    for (const CudaDevice& device : cuda_devices()) {
      std::printf("  cuda:%-8d %s, compute capability %d.%d, %d multiprocessors, %.0f GiB\n",
                  device.ordinal, device.name.c_str(), device.major, device.minor,
                  device.multiprocessors, static_cast<double>(device.memory) / (1 << 30));
      std::printf("  kernels       %s\n", device.kernels.empty()
                                              ? "none: needed is compute capability 8.0 or newer"
                                              : device.kernels.c_str());
    }
  } catch (const Error& e) {
    std::printf("  not usable    %s\n", e.what());
  }
}

int doctor() {
  std::printf("minference %s\n", version());
  const bool kernels = report_kernels();
  const bool llama = report_llama();
  report_cuda();
  return kernels && llama ? kOk : kRuntimeFailure;
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "doctor", "Check kernels, llama.cpp, the plug-in and CUDA on this machine");
  command->footer(
      "Exit code 1 when something is not in order.\n"
      "Example:\n"
      "  minference doctor");
  command->callback([&exit_code] { exit_code = doctor(); });
}

}  // namespace minference::cli

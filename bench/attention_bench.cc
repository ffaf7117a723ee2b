// attention_bench: `minference bench --attention` for builds without llama.cpp.
#include <exception>

#include <CLI/CLI.hpp>

#include "bench/attention.h"
#include "bench/report.h"

int main(int argc, char** argv) {
  minference::bench::AttentionBench bench;
  std::string json_path;
  CLI::App app{"Measures attention kernels against ggml's, results checked in fp64 first."};
  minference::bench::add_common_options(app, bench.kernel);
  minference::bench::add_kernel_options(app, bench.kernel);
  minference::bench::add_attention_options(app, bench);
  app.add_option("--json", json_path, "Also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    if (!json_path.empty()) minference::bench::check_writable(json_path);
    const auto report = minference::bench::run_attention_bench(bench, stdout);
    if (!json_path.empty()) minference::bench::write_report(json_path, report);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_bench: error: %s\n", error.what());
    return 1;
  }
  return 0;
}

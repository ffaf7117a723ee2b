// linear_bench: GFLOP/s of prefill matrix products per weight format, beside ggml's own.
//
// Each figure is of one product weight [rows, cols] x activations [tokens, cols], unpacking included.
// ggml is measured in plain layout and, where it has one for the format, in its repacked layout.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "core/parallel.h"
#include "ggml_peer.h"
#include "llama/ggml_weight.h"
#include "minference/error.h"
#include "minference/linear.h"
#include "timing.h"

namespace {

using namespace minference;         // NOLINT(google-build-using-namespace): a program
using namespace minference::bench;  // NOLINT(google-build-using-namespace)

struct Config {
  std::vector<std::int64_t> tokens{64, 128, 512, 2048};
  std::int64_t rows = 4096;
  std::int64_t cols = 4096;
  int threads = 0;
  int repetitions = 5;
  std::vector<std::string> levels;
  std::vector<std::string> types{"f16",  "bf16", "q4_0", "q4_1", "q5_0",
                                 "q8_0", "q4_K", "q5_K", "q6_K"};
  std::string json_path;
};

ggml_type parse_type(const std::string& name) {
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const auto candidate = static_cast<ggml_type>(type);
    const char* known = ggml_type_name(candidate);
    if (known != nullptr && name == known && llama_host::weight_format(candidate)) return candidate;
  }
  throw InvalidArgument("'" + name + "' is no weight format that linear() unpacks");
}

// Largest difference between two results, relative to the largest value.
double difference(const float* a, const float* b, std::int64_t count) {
  double largest = 0.0;
  double apart = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
    apart = std::max(apart, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return apart / largest;
}

class Report {
 public:
  explicit Report(const Config& config) : config_(config) {
    std::printf("%6s %6s  %-14s %-12s %9s %9s %9s %9s  %s\n", "tokens", "type", "kernel", "isa",
                "min ms", "median ms", "max ms", "GFLOP/s", "difference from ggml");
  }

  void add(std::int64_t tokens, const std::string& type, const char* kernel, const char* level,
           const Timing& timing, double apart) {
    const double flop = 2.0 * static_cast<double>(tokens) * static_cast<double>(config_.rows) *
                        static_cast<double>(config_.cols);
    std::printf("%6lld %6s  %-14s %-12s %9.2f %9.2f %9.2f %9.1f  %.1e\n",
                static_cast<long long>(tokens), type.c_str(), kernel, level, timing.minimum * 1e3,
                timing.median * 1e3, timing.maximum * 1e3, flop / timing.median / 1e9, apart);
    std::fflush(stdout);
    rows_.push_back({{"tokens", tokens},
                     {"type", type},
                     {"kernel", kernel},
                     {"isa", level},
                     {"min_seconds", timing.minimum},
                     {"median_seconds", timing.median},
                     {"max_seconds", timing.maximum},
                     {"gflops", flop / timing.median / 1e9},
                     {"difference", apart}});
  }

  const nlohmann::json& rows() const { return rows_; }

 private:
  const Config& config_;
  nlohmann::json rows_ = nlohmann::json::array();
};

void run_type(const Config& config, const std::string& name, Report& report) {
  const ggml_type type = parse_type(name);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> weight(config.rows * config.cols);
  for (float& value : weight) value = normal(random);
  const int threads = resolve_threads(config.threads);
  for (const std::int64_t tokens : config.tokens) {
    std::vector<float> activations(tokens * config.cols);
    for (float& value : activations) value = normal(random);
    GgmlMatMul plain(type, weight, activations, config.rows, config.cols, tokens, threads, false);
    report.add(tokens, name, "ggml", "", measure(config.repetitions, [&] { plain.run(); }), 0.0);
    GgmlMatMul repacked(type, weight, activations, config.rows, config.cols, tokens, threads, true);
    if (repacked.repacked()) {
      const Timing timing = measure(config.repetitions, [&] { repacked.run(); });
      report.add(tokens, name, "ggml repacked", "", timing,
                 difference(repacked.output(), plain.output(), tokens * config.rows));
    }
    std::vector<IsaLevel> levels;
    for (const std::string& level : config.levels) levels.push_back(parse_isa(level));
    if (levels.empty()) levels = available_isa_levels();
    for (const IsaLevel level : levels) {
      const llama_host::GgmlWeight ours(plain.weight(), *llama_host::weight_format(type), level);
      std::vector<float> out(tokens * config.rows);
      const Timing timing = measure(config.repetitions, [&] {
        linear_cpu(activations.data(), config.cols, tokens, ours.linear_weight(), out.data(),
                   config.rows, level, config.threads);
      });
      const double apart = difference(out.data(), plain.output(), tokens * config.rows);
      // ggml rounds activations to 8 bits for quantised weights, which is what dominates.
      if (!(apart < 0.03)) throw Error(name + ": result differs from ggml's");
      report.add(tokens, name, "linear", isa_name(level), timing, apart);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app{"Measures prefill matrix products against ggml's."};
  app.add_option("--tokens", config.tokens, "Tokens")->check(CLI::Range(1, 1 << 16));
  app.add_option("--rows", config.rows, "Output features")->check(CLI::Range(1, 1 << 20));
  app.add_option("--cols", config.cols, "Input features, a multiple of 256")
      ->check(CLI::Range(256, 1 << 20));
  app.add_option("-t,--threads", config.threads, "Threads, 0 = all")->check(CLI::Range(0, 1024));
  app.add_option("-r,--repetitions", config.repetitions, "Timed calls")->check(CLI::Range(1, 1000));
  app.add_option("--isa", config.levels, "ISA levels (default: all available)");
  app.add_option("--type", config.types, "Weight formats, as ggml names them");
  app.add_option("--json", config.json_path, "Also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    if (config.cols % 256 != 0) {
      throw InvalidArgument("--cols is " + std::to_string(config.cols) +
                            "; legal: multiples of 256");
    }
    Report report(config);
    for (const std::string& type : config.types) run_type(config, type, report);
    if (!config.json_path.empty()) {
      std::ofstream file(config.json_path);
      file << report.rows().dump(2) << '\n';
      if (!file) throw IoError("cannot write " + config.json_path);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "linear_bench: error: %s\n", error.what());
    return 1;
  }
  return 0;
}

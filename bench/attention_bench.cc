// attention_bench: GFLOP/s of dense and sparse attention per ISA level, beside ggml's own kernel.
//
// Every figure is of one causal self-attention call. GFLOP/s count 2 * (head_dim + v_head_dim) per
// kept (query, key) pair. Results are checked against the fp64 reference on sampled rows first.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "attention/cpu/executor.h"
#include "attention/reference/reference.h"
#include "core/float16.h"
#include "core/parallel.h"
#include "minference/error.h"
#include "minference/method.h"
#include "timing.h"
#ifdef MINFERENCE_BENCH_GGML
#include "ggml_peer.h"
#endif

namespace {

using namespace minference;         // NOLINT(google-build-using-namespace): a program
using namespace minference::bench;  // NOLINT(google-build-using-namespace)

struct Config {
  std::vector<std::int64_t> tokens{8192};
  std::vector<std::int64_t> head_dims{64, 128};
  std::int64_t q_heads = 8;
  std::int64_t kv_heads = 2;
  int threads = 0;
  int repetitions = 5;
  std::vector<std::string> levels;
  std::vector<std::string> options{"vertical_size=500", "slash_size=700"};
  bool peer = true;
  std::string json_path;
};

// Q and K with what makes real heads sparse: rotary phases that favour near keys, an attention sink
// and a few heavy columns, in noise.
struct Problem {
  std::int64_t tokens, q_heads, kv_heads, head_dim;
  std::vector<float> q, k, v, out;
  std::vector<std::uint16_t> k16, v16;

  Problem(std::int64_t tokens_, const Config& config, std::int64_t head_dim_)
      : tokens(tokens_), q_heads(config.q_heads), kv_heads(config.kv_heads), head_dim(head_dim_) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::int64_t heads, bool rotary) {
      values.resize(tokens * heads * head_dim);
      for (float& value : values) value = normal(random);
      for (std::int64_t t = 0; rotary && t < tokens; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          float* row = values.data() + (t * heads + h) * head_dim;
          for (std::int64_t i = 0; i + 1 < head_dim; i += 2) {
            const double angle =
                static_cast<double>(t) * std::pow(10000.0, -static_cast<double>(i) / head_dim);
            row[i] += 1.5F * static_cast<float>(std::cos(angle));
            row[i + 1] += 1.5F * static_cast<float>(std::sin(angle));
          }
        }
      }
    };
    fill(q, q_heads, true);
    fill(k, kv_heads, true);
    fill(v, kv_heads, false);
    // A direction that every query has and heavy keys share.
    for (std::size_t i = 0; i < q.size(); i += head_dim) q[i] += 3.0F;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float weight = t < 4 ? 16.0F : (random() % 64 == 0 ? 8.0F : 0.0F);
      for (std::int64_t h = 0; h < kv_heads; ++h) k[(t * kv_heads + h) * head_dim] += weight;
    }
    out.resize(q.size());
    for (const float value : k) k16.push_back(f32_to_f16(value));
    for (const float value : v) v16.push_back(f32_to_f16(value));
  }

  AttentionInput input() {
    AttentionInput in;
    in.q = TensorView::contiguous(q.data(), DType::kF32, {1, tokens, q_heads, head_dim});
    in.k = TensorView::contiguous(k16.data(), DType::kF16, {1, tokens, kv_heads, head_dim});
    in.v = TensorView::contiguous(v16.data(), DType::kF16, {1, tokens, kv_heads, head_dim});
    return in;
  }
  AttentionOutput output() {
    AttentionOutput o;
    o.out = TensorView::contiguous(out.data(), DType::kF32, {1, tokens, q_heads, head_dim});
    return o;
  }
};

// Largest error of `out` on the last rows against the fp64 reference, relative to its largest value.
double error_of(Problem& problem, const float* out, const SparseIndex* index) {
  constexpr std::int64_t kRows = 8;
  const std::int64_t skipped = problem.tokens - kRows;
  const std::int64_t row_size = problem.q_heads * problem.head_dim;
  std::vector<float> expected(kRows * row_size);
  AttentionInput input = problem.input();
  input.q = TensorView::contiguous(problem.q.data() + skipped * row_size, DType::kF32,
                                   {1, kRows, problem.q_heads, problem.head_dim});
  AttentionOutput output;
  output.out = TensorView::contiguous(expected.data(), DType::kF32,
                                      {1, kRows, problem.q_heads, problem.head_dim});
  // A sparse index is relative to the whole chunk's row blocks, so it is judged on the whole chunk.
  if (index != nullptr) return -1.0;
  attention_reference(input, {}, output);
  double error = 0.0;
  double largest = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error =
        std::max(error, std::abs(static_cast<double>(out[skipped * row_size + i]) - expected[i]));
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return error / largest;
}

class Report {
 public:
  void add(const Problem& problem, const std::string& kernel, const std::string& level,
           const Timing& timing, double kept, double index_seconds, double error) {
    const double pairs =
        static_cast<double>(problem.tokens) * static_cast<double>(problem.tokens + 1) / 2.0;
    const double flop =
        4.0 * static_cast<double>(problem.head_dim * problem.q_heads) * pairs * kept;
    std::printf("%8lld %5lld  %-16s %-12s %9.1f %9.1f %9.1f %9.1f %7.1f %9.2f  %.1e\n",
                static_cast<long long>(problem.tokens), static_cast<long long>(problem.head_dim),
                kernel.c_str(), level.c_str(), timing.minimum * 1e3, timing.median * 1e3,
                timing.maximum * 1e3, flop / timing.median / 1e9, kept * 100.0, index_seconds * 1e3,
                error);
    std::fflush(stdout);
    rows_.push_back({{"tokens", problem.tokens},
                     {"head_dim", problem.head_dim},
                     {"q_heads", problem.q_heads},
                     {"kv_heads", problem.kv_heads},
                     {"kernel", kernel},
                     {"isa", level},
                     {"min_seconds", timing.minimum},
                     {"median_seconds", timing.median},
                     {"max_seconds", timing.maximum},
                     {"gflops", flop / timing.median / 1e9},
                     {"kept_fraction", kept},
                     {"index_seconds", index_seconds},
                     {"relative_error", error}});
  }

  static void print_header() {
    std::printf("%8s %5s  %-16s %-12s %9s %9s %9s %9s %7s %9s  %s\n", "tokens", "dim", "kernel",
                "isa", "min ms", "median ms", "max ms", "GFLOP/s", "kept %", "index ms", "error");
  }

  const nlohmann::json& rows() const { return rows_; }

 private:
  nlohmann::json rows_ = nlohmann::json::array();
};

void run_problem(const Config& config, std::int64_t tokens, std::int64_t head_dim, Report& report) {
  Problem problem(tokens, config, head_dim);
  const AttentionInput input = problem.input();
  const AttentionOutput output = problem.output();
  AttentionParams params;
  params.threads = config.threads;

#ifdef MINFERENCE_BENCH_GGML
  if (config.peer) {
    GgmlAttention peer(problem.q, problem.k, problem.v, tokens, config.q_heads, config.kv_heads,
                       head_dim, resolve_threads(config.threads));
    const Timing timing = measure(std::max(1, config.repetitions / 2), [&] { peer.run(); });
    report.add(problem, "ggml", "", timing, 1.0, 0.0, error_of(problem, peer.output(), nullptr));
  }
#endif
  std::vector<IsaLevel> levels;
  for (const std::string& name : config.levels) levels.push_back(parse_isa(name));
  if (levels.empty()) levels = available_isa_levels();
  MethodOptions options;
  for (const std::string& option : config.options) parse_option(option, options);
  const Method& method = find_method("vertical_slash");
  const MethodOptions resolved = resolve_options(method, options);
  for (const IsaLevel level : levels) {
    const Timing dense =
        measure(config.repetitions, [&] { attention_cpu(input, params, output, nullptr, level); });
    const double error = error_of(problem, problem.out.data(), nullptr);
    if (!(error < 0.02)) throw Error(std::string(isa_name(level)) + " is wrong against fp64");
    report.add(problem, "dense", isa_name(level), dense, 1.0, 0.0, error);

    double index_seconds = 0.0;
    double kept = 0.0;
    const Timing sparse = measure(config.repetitions, [&] {
      const SparseIndex index = method.build_index(input, params, resolved, {});
      index_seconds = index.build_seconds;
      kept = attention_cpu(input, params, output, &index, level).kept_fraction();
    });
    report.add(problem, "vertical_slash", isa_name(level), sparse, kept, index_seconds, -1.0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app{"Measures attention kernels; figures are of whole calls, index included."};
  app.add_option("--tokens", config.tokens, "Prompt lengths")->check(CLI::Range(64, 1 << 22));
  app.add_option("--head-dim", config.head_dims, "Head dims")->check(CLI::Range(1, 256));
  app.add_option("--heads", config.q_heads, "Query heads")->check(CLI::Range(1, 1024));
  app.add_option("--kv-heads", config.kv_heads, "KV heads")->check(CLI::Range(1, 1024));
  app.add_option("-t,--threads", config.threads, "Threads, 0 = all")->check(CLI::Range(0, 1024));
  app.add_option("-r,--repetitions", config.repetitions, "Timed calls")->check(CLI::Range(1, 1000));
  app.add_option("--isa", config.levels, "ISA levels (default: all available)");
  app.add_option("--attn-opt", config.options, "Options of vertical_slash, key=value");
  app.add_flag("!--no-peer", config.peer, "Leave ggml's kernel out");
  app.add_option("--json", config.json_path, "Also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    Report report;
    Report::print_header();
    for (const std::int64_t head_dim : config.head_dims) {
      for (const std::int64_t tokens : config.tokens) run_problem(config, tokens, head_dim, report);
    }
    if (!config.json_path.empty()) {
      std::ofstream file(config.json_path);
      file << report.rows().dump(2) << '\n';
      if (!file) throw IoError("cannot write " + config.json_path);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_bench: error: %s\n", error.what());
    return 1;
  }
  return 0;
}

#include "bench/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>

#include <CLI/CLI.hpp>

#include "bench/ggml_peer.h"
#include "bench/report.h"
#include "bench/timing.h"
#include "core/parallel.h"
#include "llama/ggml_weight.h"
#include "minference/error.h"
#include "minference/linear.h"

namespace minference::bench {
namespace {

// ggml rounds activations to 8 bits for quantised weights, which is what dominates its error; ours
// are a tenth of it.
constexpr double kErrorBound = 0.02;

ggml_type parse_type(const std::string& name) {
  std::string legal;
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const auto candidate = static_cast<ggml_type>(type);
    const char* known = ggml_type_name(candidate);
    if (known == nullptr || !llama_host::weight_format(candidate)) continue;
    if (name == known) return candidate;
    legal += (legal.empty() ? "" : ", ") + std::string(known);
  }
  throw InvalidArgument("--type " + name +
                        ": no weight format that is unpacked here; legal: " + legal);
}

// `count` of [0, size), the first and the last among them.
std::vector<std::int64_t> spread(std::int64_t count, std::int64_t size) {
  count = std::min(count, size);
  std::vector<std::int64_t> result(count);
  for (std::int64_t i = 0; i < count; ++i) result[i] = count > 1 ? i * (size - 1) / (count - 1) : 0;
  return result;
}

// Sampled elements of the product, in fp64 over the weight as ggml unpacks it.
class ExpectedProduct {
 public:
  ExpectedProduct(const ggml_tensor* weight, const std::vector<float>& activations,
                  std::int64_t token_count)
      : scale_(std::sqrt(static_cast<double>(weight->ne[0]))),
        row_count_(weight->ne[1]),
        tokens_(spread(16, token_count)),
        rows_(spread(64, row_count_)) {
    const std::int64_t cols = weight->ne[0];
    const auto unpack = ggml_get_type_traits(weight->type)->to_float;
    std::vector<float> row(cols);
    for (const std::int64_t r : rows_) {
      const char* data =
          static_cast<const char*>(weight->data) + static_cast<std::size_t>(r) * weight->nb[1];
      if (unpack != nullptr) {
        unpack(data, row.data(), cols);
      } else {
        std::memcpy(row.data(), data, static_cast<std::size_t>(cols) * sizeof(float));
      }
      for (const std::int64_t t : tokens_) {
        const float* a = activations.data() + t * cols;
        double sum = 0.0;
        for (std::int64_t i = 0; i < cols; ++i) sum += static_cast<double>(a[i]) * row[i];
        values_.push_back(sum);
      }
    }
  }

  // Largest error of a result [tokens, rows], relative to the largest expected value, or to the
  // standard deviation of all where the few of a small product happen to be smaller.
  double error_of(const float* result) const {
    double error = 0.0;
    double largest = scale_;
    auto expected = values_.begin();
    for (const std::int64_t r : rows_) {
      for (const std::int64_t t : tokens_) {
        const double apart = std::abs(result[t * row_count_ + r] - *expected);
        if (std::isnan(apart)) return std::numeric_limits<double>::quiet_NaN();
        error = std::max(error, apart);
        largest = std::max(largest, std::abs(*expected));
        ++expected;
      }
    }
    return error / largest;
  }

 private:
  double scale_;
  std::int64_t row_count_;
  std::vector<std::int64_t> tokens_;
  std::vector<std::int64_t> rows_;
  std::vector<double> values_;
};

class Table {
 public:
  Table(const LinearBench& bench, std::FILE* table)
      : bench_(bench), table_(table), machine_(machine(resolve_threads(bench.kernel.threads))) {
    if (table_ == nullptr) return;
    std::fprintf(table_, "%6s %6s  %-14s %-12s %9s %9s %9s  %s\n", "tokens", "type", "kernel",
                 "isa", "min ms", "median ms", "GFLOP/s", "error");
  }

  void add(std::int64_t tokens, const std::string& type, const std::string& kernel,
           const std::string& level, const Timing& timing, double error) {
    if (!(error < kErrorBound)) {
      throw std::runtime_error(type + " " + kernel + " " + level +
                               " is wrong against fp64: relative error " + std::to_string(error));
    }
    const double flop = 2.0 * static_cast<double>(tokens) * static_cast<double>(bench_.rows) *
                        static_cast<double>(bench_.cols);
    const double gflops = flop / timing.minimum / 1e9;
    if (table_ != nullptr) {
      std::fprintf(table_, "%6lld %6s  %-14s %-12s %9.2f %9.2f %9.1f  %.1e\n",
                   static_cast<long long>(tokens), type.c_str(), kernel.c_str(), level.c_str(),
                   timing.minimum * 1e3, timing.median * 1e3, gflops, error);
      std::fflush(table_);
    }
    nlohmann::ordered_json json;
    json["tokens"] = tokens;
    json["rows"] = bench_.rows;
    json["cols"] = bench_.cols;
    json["type"] = type;
    json["kernel"] = kernel;
    json["isa"] = level;
    json["min_seconds"] = timing.minimum;
    json["median_seconds"] = timing.median;
    json["max_seconds"] = timing.maximum;
    json["gflops"] = gflops;
    json["gflops_median"] = flop / timing.median / 1e9;
    json["relative_error"] = error;
    rows_.push_back(std::move(json));
  }

  nlohmann::ordered_json report() {
    nlohmann::ordered_json json;
    json["bench"] = "linear";
    json["machine"] = std::move(machine_);
    json["rows"] = std::move(rows_);
    return json;
  }

 private:
  const LinearBench& bench_;
  std::FILE* table_;
  nlohmann::ordered_json machine_;  // asked first: it refuses a wrong MINFERENCE_FORCE_ISA
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

std::vector<float> normal_values(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

void run_product(const LinearBench& bench, const std::vector<IsaLevel>& levels,
                 const std::string& name, const std::vector<float>& weight, std::int64_t tokens,
                 Table& table) {
  const ggml_type type = parse_type(name);
  const int threads = resolve_threads(bench.kernel.threads);
  const int repetitions = bench.kernel.repetitions;
  const std::vector<float> activations = normal_values(tokens * bench.cols, 2);
  // Made even where it is not measured: it holds the packed weight that all others read.
  GgmlMatMul plain(type, weight, activations, bench.rows, bench.cols, tokens, threads, false);
  const ExpectedProduct expected(plain.weight(), activations, tokens);
  if (bench.kernel.peer) {
    const Timing timing = measure(repetitions, [&] { plain.run(); });
    table.add(tokens, name, "ggml", "", timing, expected.error_of(plain.output()));
    GgmlMatMul repacked(type, weight, activations, bench.rows, bench.cols, tokens, threads, true);
    if (repacked.repacked()) {
      const Timing repacked_timing = measure(repetitions, [&] { repacked.run(); });
      table.add(tokens, name, "ggml repacked", "", repacked_timing,
                expected.error_of(repacked.output()));
    }
  }
  for (const IsaLevel level : levels) {
    const llama_host::GgmlWeight ours(plain.weight(), *llama_host::weight_format(type), level);
    std::vector<float> out(tokens * bench.rows);
    const Timing timing = measure(repetitions, [&] {
      linear_cpu(activations.data(), bench.cols, tokens, ours.linear_weight(), out.data(),
                 bench.rows, level, bench.kernel.threads);
    });
    table.add(tokens, name, "linear", isa_name(level), timing, expected.error_of(out.data()));
  }
}

}  // namespace

std::vector<CLI::Option*> add_linear_options(CLI::App& app, LinearBench& bench) {
  return {
      app.add_option("--rows", bench.rows, "Output features")
          ->check(CLI::Range(1, 1 << 20))
          ->capture_default_str(),
      app.add_option("--cols", bench.cols, "Input features, a multiple of 256")
          ->check(CLI::Range(256, 1 << 20))
          ->capture_default_str(),
      app.add_option("--type", bench.types, "Weight formats, as ggml names them")->delimiter(',')};
}

nlohmann::ordered_json run_linear_bench(const LinearBench& bench, std::FILE* table) {
  constexpr std::int64_t kMaxTokens = 1 << 16;
  std::vector<std::int64_t> lengths = parse_lengths(bench.kernel.tokens, 1, kMaxTokens);
  if (lengths.empty()) lengths = {64, 128, 512, 2048};
  const std::vector<IsaLevel> levels = levels_to_measure(bench.kernel.levels);
  if (bench.cols % LinearWeight::kUnpackChunk != 0) {
    throw InvalidArgument("--cols is " + std::to_string(bench.cols) + "; legal: multiples of " +
                          std::to_string(LinearWeight::kUnpackChunk));
  }
  for (const std::string& type : bench.types) parse_type(type);

  Table rows(bench, table);
  const std::vector<float> weight = normal_values(bench.rows * bench.cols, 1);
  for (const std::string& type : bench.types) {
    for (const std::int64_t tokens : lengths) {
      run_product(bench, levels, type, weight, tokens, rows);
    }
  }
  return rows.report();
}

}  // namespace minference::bench

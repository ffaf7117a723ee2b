#include "bench/attention.h"

#include <algorithm>
#include <stdexcept>

#include <CLI/CLI.hpp>

#include "attention/cpu/executor.h"
#include "bench/attention_problem.h"
#include "bench/index_cost.h"
#include "bench/report.h"
#include "bench/sparse_shapes.h"
#include "bench/timing.h"
#include "core/parallel.h"
#include "minference/error.h"
#include "minference/method.h"
#ifdef MINFERENCE_BENCH_GGML
#include "bench/ggml_peer.h"
#endif

namespace minference::bench {
namespace {

// Largest errors, relative to the largest value of the result, by how products are computed. f32
// sums thousands of terms; bf16 also moves the score of a heavy column by up to a twentieth. A
// wrong tile moves a result by its own size.
constexpr double kF32Bound = 1e-4;
constexpr double kBf16Bound = 5e-2;

struct Measured {
  std::string kernel;
  std::string isa;
  Timing timing{};
  double kept = 1.0;
  double index_seconds = 0.0;
  double error = 0.0;
  double bound = kBf16Bound;  // of `error`

  Measured(std::string kernel_name, IsaLevel level)
      : kernel(std::move(kernel_name)),
        isa(isa_name(level)),
        bound(isa_is_bf16(level) ? kBf16Bound : kF32Bound) {}
  explicit Measured(std::string kernel_name) : kernel(std::move(kernel_name)) {}
};

class Table {
 public:
  Table(const AttentionBench& bench, std::FILE* table)
      : table_(table), machine_(machine(resolve_threads(bench.kernel.threads))) {
    if (table_ == nullptr) return;
    std::fprintf(table_, "%8s %5s  %-16s %-12s %9s %9s %9s %10s %7s %9s  %s\n", "tokens", "dim",
                 "kernel", "isa", "min ms", "median ms", "GFLOP/s", "of dense %", "kept %",
                 "index ms", "error");
  }

  // GFLOP/s count 2 * (head_dim + v_head_dim) per kept (query, key) pair. dense_gflops: the rate of
  // dense attention at the same level, 0 when there is none to compare with. Returns the rate.
  double add(const AttentionProblem& problem, const Measured& row, double dense_gflops) {
    if (!(row.error < row.bound)) {
      throw std::runtime_error(row.kernel + " " + row.isa +
                               " is wrong against fp64: relative error " +
                               std::to_string(row.error));
    }
    const ProblemShape& shape = problem.shape();
    const double flop = 4.0 * static_cast<double>(shape.head_dim * shape.q_heads) *
                        problem.causal_pairs() * row.kept;
    const double gflops = flop / row.timing.minimum / 1e9;
    const double of_dense = dense_gflops > 0 ? gflops / dense_gflops : 0.0;
    print(shape, row, gflops, of_dense);
    nlohmann::ordered_json json;
    json["tokens"] = shape.tokens;
    json["head_dim"] = shape.head_dim;
    json["q_heads"] = shape.q_heads;
    json["kv_heads"] = shape.kv_heads;
    json["kernel"] = row.kernel;
    json["isa"] = row.isa;
    json["min_seconds"] = row.timing.minimum;
    json["median_seconds"] = row.timing.median;
    json["max_seconds"] = row.timing.maximum;
    json["gflops"] = gflops;
    json["gflops_median"] = flop / row.timing.median / 1e9;
    json["fraction_of_dense_rate"] =
        dense_gflops > 0 ? nlohmann::ordered_json(of_dense) : nlohmann::ordered_json();
    json["kept_fraction"] = row.kept;
    json["index_seconds"] = row.index_seconds;
    json["relative_error"] = row.error;
    rows_.push_back(std::move(json));
    return gflops;
  }

  // What estimating one head costs, beside computing it densely; both on one thread.
  void add_index(const ProblemShape& shape, IsaLevel level, const Timing& index,
                 const Timing& dense) {
    if (table_ != nullptr) {
      std::fprintf(table_,
                   "%8lld %5lld  last-q index of one head, one thread: %.2f ms, %.2f %% of its "
                   "dense time of %.2f ms (%s)\n",
                   static_cast<long long>(shape.tokens), static_cast<long long>(shape.head_dim),
                   index.minimum * 1e3, 100.0 * index.minimum / dense.minimum, dense.minimum * 1e3,
                   isa_name(level));
      std::fflush(table_);
    }
    nlohmann::ordered_json json;
    json["tokens"] = shape.tokens;
    json["head_dim"] = shape.head_dim;
    json["isa"] = isa_name(level);
    json["min_seconds"] = index.minimum;
    json["median_seconds"] = index.median;
    json["dense_min_seconds"] = dense.minimum;
    json["dense_median_seconds"] = dense.median;
    json["fraction_of_dense"] = index.minimum / dense.minimum;
    index_.push_back(std::move(json));
  }

  nlohmann::ordered_json report() {
    nlohmann::ordered_json json;
    json["bench"] = "attention";
    json["machine"] = std::move(machine_);
    json["rows"] = std::move(rows_);
    json["one_head_index"] = std::move(index_);
    return json;
  }

 private:
  void print(const ProblemShape& shape, const Measured& row, double gflops, double of_dense) const {
    if (table_ == nullptr) return;
    char share[16] = "-";
    if (of_dense > 0) std::snprintf(share, sizeof(share), "%.1f", 100.0 * of_dense);
    std::fprintf(table_, "%8lld %5lld  %-16s %-12s %9.2f %9.2f %9.1f %10s %7.1f %9.2f  %.1e\n",
                 static_cast<long long>(shape.tokens), static_cast<long long>(shape.head_dim),
                 row.kernel.c_str(), row.isa.c_str(), row.timing.minimum * 1e3,
                 row.timing.median * 1e3, gflops, share, 100.0 * row.kept, row.index_seconds * 1e3,
                 row.error);
    std::fflush(table_);
  }

  std::FILE* table_;
  nlohmann::ordered_json machine_;  // asked first: it refuses a wrong MINFERENCE_FORCE_ISA
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json index_ = nlohmann::ordered_json::array();
};

// One index that is measured at every level, and what has to come out.
struct SparseCase {
  std::string name;
  SparseIndex index;
  ExpectedRows expected;
};

class Run {
 public:
  Run(const AttentionBench& bench, const ProblemShape& shape, Table& table)
      : bench_(bench),
        problem_(shape),
        input_(problem_.input()),
        output_(problem_.output()),
        table_(table),
        expected_(problem_, nullptr, bench.kernel.threads) {
    params_.threads = bench.kernel.threads;
    MethodOptions given;
    for (const std::string& option : bench.method_options) parse_option(option, given);
    sizes_ = resolve_options(method_, given);
  }

  void run(const std::vector<IsaLevel>& levels) {
    run_peer();
    const std::vector<SparseCase> cases = sparse_cases();
    // The estimate is the same at every level.
    const SparseIndex estimated = method_.build_index(input_, params_, sizes_, {});
    const ExpectedRows expected(problem_, &estimated, params_.threads);
    for (const IsaLevel level : levels) {
      const double dense = run_dense(level);
      run_method(level, expected, dense);
      for (const SparseCase& sparse : cases) run_sparse(level, sparse, dense);
    }
    run_index();
  }

 private:
  void run_peer() {
#ifdef MINFERENCE_BENCH_GGML
    if (!bench_.kernel.peer) return;
    const ProblemShape& shape = problem_.shape();
    GgmlAttention peer(problem_.q(), problem_.k(), problem_.v(), shape.tokens, shape.q_heads,
                       shape.kv_heads, shape.head_dim, resolve_threads(params_.threads));
    Measured row("ggml");
    row.timing = measure(bench_.kernel.repetitions, [&] { peer.run(); });
    row.error = expected_.error_of(peer.output());
    table_.add(problem_, row, 0.0);
#endif
  }

  double run_dense(IsaLevel level) {
    Measured row("dense", level);
    row.timing = measure(bench_.kernel.repetitions,
                         [&] { attention_cpu(input_, params_, output_, nullptr, level); });
    row.error = expected_.error_of(problem_.result());
    return table_.add(problem_, row, 0.0);
  }

  // The method as hosts call it: estimating is part of the time.
  void run_method(IsaLevel level, const ExpectedRows& expected, double dense_gflops) {
    Measured row(method_.name(), level);
    row.timing = measure(bench_.kernel.repetitions, [&] {
      const SparseIndex index = method_.build_index(input_, params_, sizes_, {});
      row.index_seconds = index.build_seconds;
      row.kept = attention_cpu(input_, params_, output_, &index, level).kept_fraction();
    });
    row.error = expected.error_of(problem_.result());
    table_.add(problem_, row, dense_gflops);
  }

  void run_sparse(IsaLevel level, const SparseCase& sparse, double dense_gflops) {
    Measured row(sparse.name, level);
    row.timing = measure(bench_.kernel.repetitions, [&] {
      row.kept = attention_cpu(input_, params_, output_, &sparse.index, level).kept_fraction();
    });
    row.error = sparse.expected.error_of(problem_.result());
    table_.add(problem_, row, dense_gflops);
  }

  std::vector<SparseCase> sparse_cases() {
    std::vector<SparseCase> cases;
    if (!bench_.kept_percent) return cases;
    const double fraction = *bench_.kept_percent / 100.0;
    const MethodOptions sizes = vertical_slash_sizes(problem_, sizes_, fraction);
    const auto add = [&](const char* name, const SparseIndex& index) {
      cases.push_back({name, index, ExpectedRows(problem_, &index, params_.threads)});
    };
    add("diagonal", method_.build_index(input_, params_, sizes, {}));
    add("block", random_blocks(problem_.shape(), fraction));
    return cases;
  }

  void run_index() {
    const IsaLevel level = choose_isa(true);
    AttentionParams params;
    params.threads = 1;
    const AttentionInput input = problem_.one_head_input();
    const AttentionOutput output = problem_.one_head_output();
    MethodContext context;
    context.threads = 1;
    const Timing index = measure(bench_.kernel.repetitions,
                                 [&] { method_.build_index(input, params, sizes_, context); });
    const Timing dense = measure(bench_.kernel.repetitions,
                                 [&] { attention_cpu(input, params, output, nullptr, level); });
    table_.add_index(problem_.shape(), level, index, dense);
  }

  const AttentionBench& bench_;
  AttentionProblem problem_;
  AttentionInput input_;
  AttentionOutput output_;
  AttentionParams params_;
  Table& table_;
  ExpectedRows expected_;
  const Method& method_ = find_method("vertical_slash");
  MethodOptions sizes_;
};

}  // namespace

std::vector<CLI::Option*> add_attention_options(CLI::App& app, AttentionBench& bench) {
  return {app.add_option("--head-dim", bench.head_dims, "Head dims")
              ->delimiter(',')
              ->check(CLI::Range(1, 256)),
          app.add_option("--heads", bench.q_heads, "Query heads")
              ->check(CLI::Range(1, 1024))
              ->capture_default_str(),
          app.add_option("--kv-heads", bench.kv_heads, "KV heads")
              ->check(CLI::Range(1, 1024))
              ->capture_default_str(),
          app.add_option("--attn-opt", bench.method_options, "Options of vertical_slash, key=value")
              ->delimiter(','),
          app.add_option("--kept", bench.kept_percent,
                         "Also measure an index of columns and diagonals, and one of blocks, that "
                         "keep about this many % of the causal area")
              ->check(CLI::Range(0.1, 100.0)),
          app.add_flag("--index-cost", bench.index_cost,
                       "Instead of kernels, measure what the index of each method and the guard "
                       "cost in chunked prefill, beside dense attention"),
          app.add_option("--chunk", bench.chunks, "Rows of a prefill step, for --index-cost")
              ->delimiter(',')
              ->check(CLI::Range(64, 1 << 20))
              ->capture_default_str()};
}

nlohmann::ordered_json run_attention_bench(const AttentionBench& bench, std::FILE* table) {
  constexpr std::int64_t kMinTokens = 64;
  constexpr std::int64_t kMaxTokens = 1 << 22;
  std::vector<std::int64_t> lengths = parse_lengths(bench.kernel.tokens, kMinTokens, kMaxTokens);
  if (lengths.empty()) lengths = {8192};
  const std::vector<IsaLevel> levels = levels_to_measure(bench.kernel.levels);
  if (bench.q_heads % bench.kv_heads != 0) {
    throw InvalidArgument("--heads is " + std::to_string(bench.q_heads) +
                          "; legal: multiples of --kv-heads, " + std::to_string(bench.kv_heads));
  }
  MethodOptions given;
  for (const std::string& option : bench.method_options) parse_option(option, given);
  resolve_options(find_method("vertical_slash"), given);
  if (bench.index_cost) {
    nlohmann::ordered_json report;
    report["bench"] = "index cost";
    report["machine"] = machine(resolve_threads(bench.kernel.threads));
    report["rows"] = measure_index_cost(bench, lengths, table);
    return report;
  }

  Table rows(bench, table);
  for (const std::int64_t head_dim : bench.head_dims) {
    for (const std::int64_t tokens : lengths) {
      Run(bench, {tokens, bench.q_heads, bench.kv_heads, head_dim}, rows).run(levels);
    }
  }
  return rows.report();
}

}  // namespace minference::bench

#include "bench/index_cost.h"

#include <algorithm>
#include <string>

#include "attention/cpu/executor.h"
#include "attention/precision.h"
#include "bench/attention_problem.h"
#include "bench/timing.h"
#include "minference/guard.h"
#include "minference/method.h"

namespace minference::bench {
namespace {

// Rows that are measured at least, so that methods whose chunks share estimates show their mean.
constexpr std::int64_t kMeasuredRows = 2048;

class Window {
 public:
  Window(const AttentionBench& bench, AttentionProblem& problem, std::int64_t chunk)
      : bench_(bench),
        problem_(problem),
        chunk_(std::min(chunk, problem.shape().tokens)),
        begin_(std::max<std::int64_t>(problem.shape().tokens - std::max(chunk, kMeasuredRows), 0)) {
    params_.threads = bench.kernel.threads;
  }

  std::int64_t chunk() const { return chunk_; }

  double dense_seconds() {
    const AttentionOutput output = problem_.output();
    const IsaLevel level = choose_isa(allows_bf16(problem_.input(), params_));
    return measure(bench_.kernel.repetitions,
                   [&] {
                     for_each_chunk([&](const AttentionInput& input) {
                       AttentionOutput rows = output;
                       rows.out.shape[1] = input.q.tokens();
                       attention_cpu(input, params_, rows, nullptr, level);
                     });
                   })
        .minimum;
  }

  double index_seconds(const Method& method, const MethodOptions& options) {
    MethodState before;
    MethodContext context;
    context.state = &before;
    if (begin_ > 0) {
      method.build_index(problem_.rows(std::max<std::int64_t>(begin_ - chunk_, 0), begin_), params_,
                         options, context);
    }
    MethodState state;
    context.state = &state;
    double seconds = 0.0;
    double least = 0.0;
    measure(bench_.kernel.repetitions, [&] {
      state = before;
      seconds = 0.0;
      for_each_chunk([&](const AttentionInput& input) {
        seconds += method.build_index(input, params_, options, context).build_seconds;
      });
      least = least == 0.0 ? seconds : std::min(least, seconds);
    });
    return least;
  }

  // Of the indices that a method builds without a state.
  double guard_seconds(const Method& method, const MethodOptions& options) {
    std::vector<SparseIndex> indices;
    for_each_chunk([&](const AttentionInput& input) {
      indices.push_back(method.build_index(input, params_, options, {}));
    });
    double least = 0.0;
    measure(bench_.kernel.repetitions, [&] {
      Stats stats;
      auto index = indices.begin();
      for_each_chunk([&](const AttentionInput& input) {
        guard(input, params_, {GuardMode::kReport}, *index++, stats);
      });
      least = least == 0.0 ? stats.guard_seconds : std::min(least, stats.guard_seconds);
    });
    return least;
  }

 private:
  template <class Visit>
  void for_each_chunk(Visit&& visit) {
    for (std::int64_t row = begin_; row < problem_.shape().tokens; row += chunk_) {
      visit(problem_.rows(row, std::min(row + chunk_, problem_.shape().tokens)));
    }
  }

  const AttentionBench& bench_;
  AttentionProblem& problem_;
  AttentionParams params_;
  std::int64_t chunk_;
  std::int64_t begin_;
};

}  // namespace

nlohmann::ordered_json measure_index_cost(const AttentionBench& bench,
                                          const std::vector<std::int64_t>& lengths,
                                          std::FILE* table) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  MethodOptions sizes;
  for (const std::string& option : bench.method_options) parse_option(option, sizes);
  if (table != nullptr) {
    std::fprintf(table, "%8s %5s %7s %6s  %-26s %9s %9s %10s\n", "tokens", "dim", "heads", "chunk",
                 "cost of", "ms", "dense ms", "of dense %");
  }
  for (const std::int64_t head_dim : bench.head_dims) {
    for (const std::int64_t tokens : lengths) {
      AttentionProblem problem({tokens, bench.q_heads, bench.kv_heads, head_dim});
      for (const std::int64_t chunk : bench.chunks) {
        Window window(bench, problem, chunk);
        const double dense = window.dense_seconds();
        const auto add = [&](const std::string& name, double seconds) {
          if (table != nullptr) {
            const std::string heads =
                std::to_string(bench.q_heads) + "/" + std::to_string(bench.kv_heads);
            std::fprintf(table, "%8lld %5lld %7s %6lld  %-26s %9.2f %9.2f %10.2f\n",
                         static_cast<long long>(tokens), static_cast<long long>(head_dim),
                         heads.c_str(), static_cast<long long>(window.chunk()), name.c_str(),
                         seconds * 1e3, dense * 1e3, 100.0 * seconds / dense);
            std::fflush(table);
          }
          nlohmann::ordered_json json;
          json["tokens"] = tokens;
          json["head_dim"] = head_dim;
          json["q_heads"] = bench.q_heads;
          json["kv_heads"] = bench.kv_heads;
          json["chunk"] = window.chunk();
          json["cost_of"] = name;
          json["seconds"] = seconds;
          json["dense_seconds"] = dense;
          json["fraction_of_dense"] = seconds / dense;
          rows.push_back(std::move(json));
        };
        for (const Method* method : attention_methods()) {
          const std::string name = method->name();
          if (name == "dense") continue;
          const MethodOptions options =
              resolve_options(*method, name == "vertical_slash" ? sizes : MethodOptions());
          add(name, window.index_seconds(*method, options));
        }
        for (const char* name : {"vertical_slash", "block_sparse"}) {
          const Method& method = find_method(name);
          const MethodOptions options = resolve_options(
              method, name == std::string("vertical_slash") ? sizes : MethodOptions());
          add(std::string("guard of ") + name, window.guard_seconds(method, options));
        }
      }
    }
  }
  return rows;
}

}  // namespace minference::bench

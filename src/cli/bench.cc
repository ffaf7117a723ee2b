// minference bench: kernel tables, and times to first token.
#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>

#include "bench/attention.h"
#include "bench/linear.h"
#include "bench/report.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "cli/ttft_bench.h"
#include "llama/failure.h"
#include "llama/plugin_config.h"
#include "llama/plugin_loader.h"

namespace minference::cli {
namespace {

struct BenchOptions {
  bool attention = false;
  bool linear = false;
  TtftOptions ttft;
  bench::AttentionBench attention_bench;
  bench::LinearBench linear_bench;
  bench::KernelOptions kernel;
  std::int64_t threads = 0;      // 0: not given
  std::int64_t repetitions = 0;  // 0: not given
  std::string output;
  bool json = false;
};

int finish(const BenchOptions& options, const nlohmann::ordered_json& report) {
  if (!options.output.empty()) bench::write_report(options.output, report);
  if (options.json) std::printf("%s\n", report.dump().c_str());
  return kOk;
}

int run_kernels(const BenchOptions& options, std::FILE* table) {
  bench::KernelOptions kernel = options.kernel;
  kernel.threads = static_cast<int>(options.threads);
  if (options.repetitions > 0) kernel.repetitions = static_cast<int>(options.repetitions);
  // ggml's kernels as `run` has them: its log kept quiet, its version checked.
  llama_host::start_backends(false);
  if (options.attention) {
    bench::AttentionBench attention = options.attention_bench;
    attention.kernel = kernel;
    return finish(options, bench::run_attention_bench(attention, table));
  }
  bench::LinearBench linear = options.linear_bench;
  linear.kernel = kernel;
  return finish(options, bench::run_linear_bench(linear, table));
}

int run_ttft(const BenchOptions& options, std::FILE* table) {
  constexpr std::int64_t kMaxTokens = 1 << 24;
  TtftOptions ttft = options.ttft;
  ttft.lengths = bench::parse_lengths(options.kernel.tokens, kMinTtftTokens, kMaxTokens);
  if (ttft.lengths.empty()) ttft.lengths = {4096, 8192};
  ttft.threads = options.threads;
  if (options.repetitions > 0) ttft.repetitions = options.repetitions;
  const TtftReport report = run_ttft_bench(ttft, table, options.output);
  if (options.json) std::printf("%s\n", report.json.dump().c_str());
  if (report.failed > 0) {
    throw llama_host::RuntimeFailure(std::to_string(report.failed) + " of " +
                                     std::to_string(report.cells) + " cells failed");
  }
  return kOk;
}

int run(const BenchOptions& options) {
  if (!options.output.empty()) bench::check_writable(options.output);
  std::FILE* table = options.json ? nullptr : stdout;
  return options.attention || options.linear ? run_kernels(options, table)
                                             : run_ttft(options, table);
}

// The options of one table only; CLI11 refuses them, by name, without it.
void need(CLI::Option* table, const std::vector<CLI::Option*>& options) {
  for (CLI::Option* option : options) option->needs(table);
}

std::vector<CLI::Option*> add_ttft_options(CLI::App& command, TtftOptions& ttft) {
  return {
      command
          .add_option("--attn", ttft.methods,
                      "Methods, each name[:key=value...]; stock is measured first")
          ->delimiter(',')
          ->capture_default_str(),
      command.add_option("--prompt-file", ttft.prompt_file,
                         "Text that prompts are cut from; - is standard input (default: "
                         "built-in words)"),
      command.add_option("-n,--answer", ttft.tokens, "Tokens of the answer")
          ->check(integer_between(1, 1 << 20))
          ->capture_default_str(),
      command.add_option("--ubatch", ttft.ubatch, "Tokens of a prefill step")
          ->check(integer_between(kRowBlock, 16384))
          ->capture_default_str(),
      command
          .add_option(
              "--pattern", ttft.pattern,
              "Pattern file (JSON), or the name of a shipped one, for the method minference")
          ->transform(shipped_pattern()),
      command
          .add_option("--guard", ttft.guard,
                      "report: measure what mass is kept; enforce: run heads exactly that keep\n"
                      "less than 90 %; off")
          ->check(CLI::IsMember({"off", "report", "enforce"}))
          ->capture_default_str()};
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Measure kernels against ggml's, or a model's time to first token");
  CLI::Option* attention = command->add_flag("--attention", options->attention,
                                             "Attention kernels, per level, beside ggml's");
  CLI::Option* linear = command->add_flag("--linear", options->linear,
                                          "Matrix products, per weight format, beside ggml's");
  CLI::Option* model = command->add_option("-m,--model", options->ttft.model,
                                           "Time to first token of this model, a process per cell");
  attention->excludes(linear);
  attention->excludes(model);
  linear->excludes(model);

  command
      ->add_option("-p,--tokens", options->kernel.tokens,
                   "Lengths, k is 1024 (default: -m 4k,8k; --attention 8k; --linear 64,128,512,2k)")
      ->delimiter(',');
  command->add_option("-t,--threads", options->threads, "Threads (default: one per core)")
      ->check(integer_between(1, 512));
  command
      ->add_option("-r,--repetitions", options->repetitions,
                   "Timed runs (default: 1 with -m, 5 calls otherwise)")
      ->check(integer_between(1, 1000));
  command->add_flag("--json", options->json, "Print one JSON object instead of the table");
  command->add_option("-o,--output", options->output, "Also write the JSON object to this file");

  need(model, add_ttft_options(*command, options->ttft));
  need(attention, bench::add_attention_options(*command, options->attention_bench));
  need(linear, bench::add_linear_options(*command, options->linear_bench));
  for (CLI::Option* option : bench::add_kernel_options(*command, options->kernel)) {
    option->excludes(model);
  }
  command->footer(
      "Kernel tables check every result against fp64 first; GFLOP/s are of the fastest call.\n"
      "Examples:\n"
      "  minference bench -m model.gguf -p 8k,16k,32k\n"
      "  minference bench -m model.gguf -p 32k --prompt-file book.txt -r 3 -o ttft.json \\\n"
      "      --attn stock,dense,vertical_slash:vertical_size=800:slash_size=1000\n"
      "  minference bench --attention -p 8k,32k --head-dim 128 --kept 10\n"
      "  minference bench --attention --index-cost -p 32k --heads 14 --kv-heads 2 --head-dim 64\n"
      "  minference bench --linear --type q4_K,q8_0 -p 512 --json");
  command->callback([options, &exit_code] {
    if (!options->attention && !options->linear && options->ttft.model.empty()) {
      throw InvalidArgument("bench needs what to measure: --attention, --linear or -m model.gguf");
    }
    exit_code = run(*options);
  });
}

}  // namespace minference::cli

#include "cli/ttft_bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "bench/report.h"
#include "cli/bench_prompt.h"
#include "cli/cell_process.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "cli/status_line.h"
#include "cli/stop_signal.h"
#include "llama/failure.h"
#include "llama/plugin_config.h"

namespace minference::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Cell {
  std::string label;  // as the user wrote it
  std::string name;
  std::vector<std::string> options;
};

bool takes_patterns(const Cell& cell) {
  return cell.name != llama_host::kStock && find_method(cell.name).takes_patterns();
}

// name[:key=value...]; throws for what `run` would refuse, before a model is loaded.
Cell parse_cell(const std::string& text, const std::string& pattern) {
  Cell cell;
  cell.label = text;
  std::istringstream parts(text);
  std::getline(parts, cell.name, ':');
  for (std::string option; std::getline(parts, option, ':');) cell.options.push_back(option);
  const std::string wrong = check_method(cell.name);
  if (!wrong.empty()) throw InvalidArgument("--attn: " + wrong);
  MethodOptions options;
  try {
    for (const std::string& option : cell.options) parse_option(option, options);
    if (cell.name != llama_host::kStock) {
      resolve_options(find_method(cell.name), options);
    } else if (!options.empty()) {
      throw InvalidArgument("stock has no options");
    }
  } catch (const InvalidArgument& e) {
    throw InvalidArgument("--attn " + text + ": " + e.what());
  }
  nlohmann::json config = {{"attn", cell.name}};
  if (!pattern.empty() && takes_patterns(cell)) config["pattern"] = pattern;
  llama_host::config_from_json(config.dump());
  return cell;
}

std::vector<Cell> parse_cells(const TtftOptions& options) {
  std::vector<Cell> cells;
  bool takes_pattern = false;
  for (const std::string& text : options.methods) {
    cells.push_back(parse_cell(text, options.pattern));
    takes_pattern = takes_pattern || takes_patterns(cells.back());
  }
  if (!options.pattern.empty() && !takes_pattern) {
    throw InvalidArgument("--pattern " + options.pattern + ": a pattern file needs the method " +
                          llama_host::pattern_method_names() + " in --attn");
  }
  // The others are compared with it.
  std::stable_partition(cells.begin(), cells.end(),
                        [](const Cell& cell) { return cell.name == llama_host::kStock; });
  return cells;
}

std::vector<BenchPrompts::Prompt> make_prompts(const TtftOptions& options,
                                               const std::atomic<bool>& stop) {
  BenchPrompts prompts(options.model, options.prompt_file);
  const std::int64_t trained = prompts.trained_context();
  for (const std::int64_t tokens : options.lengths) {
    if (tokens > trained) {
      throw InvalidArgument("-p " + std::to_string(tokens) + ": " +
                            std::filesystem::path(options.model).filename().string() +
                            " was trained for a context of " + std::to_string(trained) +
                            " tokens; legal: " + std::to_string(kMinTtftTokens) + " to " +
                            std::to_string(trained));
    }
  }
  std::vector<BenchPrompts::Prompt> result;
  for (const std::int64_t tokens : options.lengths) {
    // Leaves room for the answer where the slack allows it.
    const std::int64_t room = trained - options.tokens;
    const bool fits = room >= tokens - BenchPrompts::kSlack / 2;
    result.push_back(prompts.cut(tokens, fits ? std::min(tokens, room) : tokens));
    if (stop) throw llama_host::Interrupted("interrupted");
  }
  return result;
}

std::vector<std::string> arguments_of(const TtftOptions& options, const Cell& cell) {
  std::vector<std::string> words = {"run",         "-m",
                                    options.model, "-f",
                                    "-",           "--no-chat",
                                    "--temp",      "0",
                                    "-n",          std::to_string(options.tokens),
                                    "--ubatch",    std::to_string(options.ubatch),
                                    "--guard",     options.guard,
                                    "--json",      "--attn",
                                    cell.name};
  const auto add = [&](const char* flag, const std::string& value) {
    words.insert(words.end(), {flag, value});
  };
  for (const std::string& option : cell.options) add("--attn-opt", option);
  if (!options.pattern.empty() && takes_patterns(cell)) add("--pattern", options.pattern);
  if (options.threads > 0) add("-t", std::to_string(options.threads));
  return words;
}

// The last line of a child's standard error, without its prefix; or how it ended.
std::string reason_of(const CellResult& result) {
  constexpr std::string_view kPrefix = "minference: error: ";
  std::string last;
  std::istringstream lines(result.err);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) last = line;
  }
  if (result.exit_code > 128) {
    return "ended by signal " + std::to_string(result.exit_code - 128) + " at " +
           std::to_string(static_cast<std::int64_t>(result.peak_mib)) + " MiB";
  }
  if (last.empty()) return "exit code " + std::to_string(result.exit_code);
  return last.rfind(kPrefix, 0) == 0 ? last.substr(kPrefix.size()) : last;
}

// All repetitions of one cell.
struct Measured {
  std::vector<Json> runs;
  double peak_mib = 0;
  std::string error;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Json row_of(const Cell& cell, std::int64_t tokens, const BenchPrompts::Prompt& prompt,
            const Measured& measured, double& stock_seconds) {
  Json row;
  row["tokens"] = tokens;
  row["prompt_tokens"] = prompt.tokens;
  row["attention"] = cell.label;
  if (!measured.error.empty()) {
    row["error"] = measured.error;
    return row;
  }
  std::vector<double> seconds;
  for (const Json& run : measured.runs) seconds.push_back(run.at("ttft_seconds").get<double>());
  const auto fastest = std::min_element(seconds.begin(), seconds.end());
  const Json& best = measured.runs[static_cast<std::size_t>(fastest - seconds.begin())];
  if (cell.name == llama_host::kStock) stock_seconds = *fastest;
  row["ttft_seconds"] = *fastest;
  row["ttft_median_seconds"] = median(seconds);
  row["all_ttft_seconds"] = seconds;
  row["speedup_over_stock"] = stock_seconds > 0 ? Json(stock_seconds / *fastest) : Json();
  row["peak_mib"] = measured.peak_mib;
  for (const char* key :
       {"prefill_tokens_per_second", "attention_seconds", "index_seconds", "linear_seconds",
        "kept_fraction", "mass_recall", "decode_tokens_per_second", "load_seconds", "answer_tokens",
        "threads", "isa", "fallbacks", "declined"}) {
    row[key] = best.at(key);
  }
  // An answer of one token has no decoding step.
  if (row["decode_tokens_per_second"] == 0.0) row["decode_tokens_per_second"] = nullptr;
  return row;
}

class Table {
 public:
  Table(std::FILE* table, const TtftOptions& options, const std::vector<Cell>& cells)
      : table_(table), median_(options.repetitions > 1), recall_(options.guard != "off") {
    for (const Cell& cell : cells) width_ = std::max(width_, static_cast<int>(cell.label.size()));
  }

  void add(const Json& row) {
    if (table_ == nullptr) return;
    // Not before the first row: bad input that the first run finds prints no table.
    if (!header_) print_header();
    header_ = true;
    std::fprintf(table_, "%8lld  %-*s", row.at("prompt_tokens").get<long long>(), width_,
                 row.at("attention").get<std::string>().c_str());
    if (row.contains("error")) {
      std::fprintf(table_, "  failed: %s\n", row.at("error").get<std::string>().c_str());
    } else {
      print_figures(row);
    }
    std::fflush(table_);
  }

 private:
  void print_header() const {
    std::fprintf(table_, "%8s  %-*s %8s", "tokens", width_, "attention", "TTFT s");
    if (median_) std::fprintf(table_, " %9s", "median s");
    std::fprintf(table_, " %9s %12s %8s %11s %7s", "tokens/s", "attention s", "index s",
                 "products s", "kept %");
    if (recall_) std::fprintf(table_, " %9s", "recall %");
    std::fprintf(table_, " %15s %9s %9s\n", "decode tokens/s", "peak MiB", "speed-up");
  }

  void print_figures(const Json& row) const {
    const auto number = [&](const char* key, int width, int digits, double factor = 1.0) {
      if (row.at(key).is_null()) {
        std::fprintf(table_, " %*s", width, "-");
      } else {
        std::fprintf(table_, " %*.*f", width, digits, factor * row.at(key).get<double>());
      }
    };
    number("ttft_seconds", 8, 2);
    if (median_) number("ttft_median_seconds", 9, 2);
    number("prefill_tokens_per_second", 9, 1);
    number("attention_seconds", 12, 2);
    number("index_seconds", 8, 2);
    number("linear_seconds", 11, 2);
    number("kept_fraction", 7, 1, 100.0);
    if (recall_) number("mass_recall", 9, 2, 100.0);
    number("decode_tokens_per_second", 15, 1);
    number("peak_mib", 9, 0);
    number("speedup_over_stock", 8, 2);
    std::fprintf(table_, row.at("speedup_over_stock").is_null() ? "\n" : "x\n");
    for (const auto& [reason, times] : row.at("fallbacks").items()) {
      std::fprintf(table_, "          exact instead, %lld times: %s\n", times.get<long long>(),
                   reason.c_str());
    }
    for (const Json& reason : row.at("declined")) {
      std::fprintf(table_, "          left to llama.cpp: %s\n", reason.get<std::string>().c_str());
    }
  }

  std::FILE* table_;
  bool median_;
  bool recall_;
  bool header_ = false;
  int width_ = 9;
};

// Counts the runs and says on a terminal which one is under way.
class Runner {
 public:
  Runner(const TtftOptions& options, std::int64_t runs, const std::atomic<bool>& stop)
      : options_(options), runs_(runs), stop_(stop) {}

  void run(const Cell& cell, const BenchPrompts::Prompt& prompt, Measured& measured) {
    ++done_;
    if (!measured.error.empty()) return;
    const std::string title = "run " + std::to_string(done_) + " of " + std::to_string(runs_) +
                              ": " + std::to_string(prompt.tokens) + " tokens, " + cell.label;
    const auto start = Clock::now();
    std::int64_t shown = -1;
    const CellResult result = run_cell(arguments_of(options_, cell), prompt.text, stop_, [&] {
      const std::int64_t seconds =
          std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
      if (seconds == shown) return;
      shown = seconds;
      line_.show(title + ", " + std::to_string(seconds) + " s");
    });
    line_.clear();
    measured.peak_mib = std::max(measured.peak_mib, result.peak_mib);
    Json json = Json::parse(result.out, nullptr, false);
    if (result.exit_code == kOk && json.is_object()) {
      measured.runs.push_back(std::move(json));
      succeeded_ = true;
      return;
    }
    measured.error = reason_of(result);
    if (result.exit_code == kBadInput && !succeeded_) throw InvalidArgument(measured.error);
  }

 private:
  const TtftOptions& options_;
  std::int64_t runs_;
  const std::atomic<bool>& stop_;
  StatusLine line_;
  std::int64_t done_ = 0;
  bool succeeded_ = false;
};

}  // namespace

TtftReport run_ttft_bench(const TtftOptions& options, std::FILE* table,
                          const std::string& output_path) {
  const std::atomic<bool>& stop = install_stop_signal();
  const std::vector<Cell> cells = parse_cells(options);
  const std::vector<BenchPrompts::Prompt> prompts = make_prompts(options, stop);
  // Each cell gets its own by option; inherited ones would be the defaults of cells without.
  for (const char* name : {"MINFERENCE_ATTN_OPTS", "MINFERENCE_PATTERN"}) unsetenv(name);

  TtftReport report;
  report.cells = static_cast<std::int64_t>(prompts.size() * cells.size());
  report.json["bench"] = "ttft";
  report.json["machine"] = bench::machine(static_cast<int>(options.threads));
  report.json["model"] = std::filesystem::path(options.model).filename().string();
  report.json["rows"] = Json::array();
  Table rows(table, options, cells);
  Runner runner(options, report.cells * options.repetitions, stop);
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    std::vector<Measured> measured(cells.size());
    double stock_seconds = 0;
    // The methods follow each other within a repetition, so that all meet the same machine.
    for (std::int64_t repetition = 1; repetition <= options.repetitions; ++repetition) {
      for (std::size_t c = 0; c < cells.size(); ++c) {
        runner.run(cells[c], prompts[p], measured[c]);
        if (repetition < options.repetitions) continue;
        Json row = row_of(cells[c], options.lengths[p], prompts[p], measured[c], stock_seconds);
        rows.add(row);
        if (row.contains("error")) {
          ++report.failed;
        } else {
          // What the runs chose when no number was given.
          report.json["machine"]["threads"] = row.at("threads");
        }
        report.json["rows"].push_back(std::move(row));
        if (!output_path.empty()) bench::write_report(output_path, report.json);
      }
    }
  }
  return report;
}

}  // namespace minference::cli

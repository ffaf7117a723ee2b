// minference perplexity: how well a model predicts the end of long windows of a text.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "bench/report.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/model_run.h"
#include "cli/prompt_file.h"
#include "cli/status_line.h"
#include "cli/stop_signal.h"
#include "core/stopwatch.h"
#include "llama/engine.h"
#include "llama/model_file.h"

namespace minference::cli {
namespace {

using Json = nlohmann::ordered_json;
using llama_host::Engine;
using llama_host::Token;

struct PerplexityOptions {
  ModelOptions model;
  std::string file;
  std::int64_t last = 1024;
  std::int64_t windows = 4;
  bool json = false;
};

// Mean and spread of negative log probabilities.
struct Loss {
  double sum = 0;
  double squares = 0;
  std::int64_t count = 0;

  void add(double value) {
    sum += value;
    squares += value * value;
    ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
  double perplexity() const { return std::exp(mean()); }
  // Of the perplexity, as if tokens were independent. 0 for a single token.
  double standard_error() const {
    if (count < 2) return 0;
    const double variance = std::max(0.0, squares / static_cast<double>(count) - mean() * mean());
    return perplexity() * std::sqrt(variance / static_cast<double>(count - 1));
  }
};

// Before the model is loaded.
void check_window(const PerplexityOptions& options) {
  const std::int64_t context = options.model.context;
  if (context < 2) {
    throw InvalidArgument("-c " + std::to_string(context) +
                          ": a window needs a token to score and one before it, 2 at least");
  }
  if (options.last >= context) {
    throw InvalidArgument("--last " + std::to_string(options.last) + ": a window of " +
                          std::to_string(context) + " tokens (-c) has 1 to " +
                          std::to_string(context - 1) + " that can be scored");
  }
}

void check_trained(const PerplexityOptions& options, const Engine& engine) {
  const std::int64_t context = options.model.context;
  const std::int64_t trained = engine.model().trained_context;
  if (context > trained) {
    throw InvalidArgument("-c " + std::to_string(context) + ": " + engine.model().name +
                          " was trained for a context of " + std::to_string(trained) +
                          " tokens; legal: 2 to " + std::to_string(trained));
  }
}

// Windows of `context` tokens, spread evenly over the text. Where the tokenizer begins a text with
// a start token, every window does.
class Windows {
 public:
  Windows(const PerplexityOptions& options, const Engine& engine)
      : size_(options.model.context),
        tokens_(engine.tokenize(read_prompt_file(options.file))),
        start_(engine.tokenize("")) {
    const auto total = static_cast<std::int64_t>(tokens_.size());
    if (total / options.windows < size_) {
      throw InvalidArgument(options.file + " has " + std::to_string(total) + " tokens, " +
                            std::to_string(options.windows) + " windows of " +
                            std::to_string(size_) + " need " +
                            std::to_string(options.windows * size_));
    }
    stride_ = total / options.windows;
  }

  std::int64_t first_token(std::int64_t window) const { return window * stride_; }

  std::vector<Token> tokens(std::int64_t window) const {
    const auto first = tokens_.begin() + first_token(window);
    std::vector<Token> result(first, first + size_);
    std::copy(start_.begin(), start_.end(), result.begin());
    return result;
  }

 private:
  std::int64_t size_;
  std::vector<Token> tokens_;
  std::vector<Token> start_;
  std::int64_t stride_ = 0;
};

// Over the windows; null where one has none.
Json mean_of(const Json& rows, const char* key) {
  double sum = 0;
  for (const Json& row : rows) {
    if (row.at(key).is_null()) return nullptr;
    sum += row.at(key).get<double>();
  }
  return sum / static_cast<double>(rows.size());
}

class Table {
 public:
  explicit Table(bool quiet) : quiet_(quiet) {}

  void add(const Json& row) {
    if (quiet_) return;
    if (!header_) {
      std::printf("%12s %11s %7s %9s %10s\n", "first token", "perplexity", "kept %", "recall %",
                  "prefill s");
    }
    header_ = true;
    std::printf("%12lld %11.4f %s %s %10.2f\n", row.at("first_token").get<long long>(),
                row.at("perplexity").get<double>(), percent(row.at("kept_fraction"), 7, 1).c_str(),
                percent(row.at("mass_recall"), 9, 2).c_str(),
                row.at("prefill_seconds").get<double>());
    std::fflush(stdout);
  }

 private:
  static std::string percent(const Json& value, int width, int digits) {
    char text[32];
    if (value.is_null()) {
      std::snprintf(text, sizeof(text), "%*s", width, "-");
    } else {
      std::snprintf(text, sizeof(text), "%*.*f", width, digits, 100.0 * value.get<double>());
    }
    return text;
  }

  bool quiet_;
  bool header_ = false;
};

int run(const PerplexityOptions& options) {
  const std::atomic<bool>& stop = install_stop_signal();
  check_window(options);
  llama_host::check_model_file(options.model.model);
  Engine engine(engine_options(options.model, stop));
  check_trained(options, engine);
  const Windows windows(options, engine);
  engine.open_context(options.model.context);
  for (const std::string& warning : engine.warnings()) warn(warning);

  Loss all;
  Json rows = Json::array();
  Table table(options.json);
  StatusLine line;
  for (std::int64_t window = 0; window < options.windows; ++window) {
    Loss loss;
    const Stopwatch watch;
    const std::vector<double> scores =
        engine.prefill_scored(windows.tokens(window), options.last, [&](std::int64_t done) {
          line.show("window " + std::to_string(window + 1) + " of " +
                    std::to_string(options.windows) + ": " + std::to_string(done) + "/" +
                    std::to_string(options.model.context) + " tokens");
        });
    const double seconds = watch.seconds();
    line.clear();
    for (const double score : scores) {
      loss.add(-score);
      all.add(-score);
    }
    Json row;
    row["first_token"] = windows.first_token(window);
    row["mean_loss"] = loss.mean();
    row["perplexity"] = loss.perplexity();
    row["prefill_seconds"] = seconds;
    add_totals(row, engine.plugin_totals());
    table.add(row);
    rows.push_back(std::move(row));
  }

  if (!options.json) {
    std::printf("perplexity %.4f +- %.4f, the last %lld tokens of %lld windows of %lld, %s\n",
                all.perplexity(), all.standard_error(), static_cast<long long>(options.last),
                static_cast<long long>(options.windows),
                static_cast<long long>(options.model.context), options.model.attn.c_str());
    return kOk;
  }
  Json json;
  json["model"] = engine.model().name;
  json["method"] = options.model.attn;
  json["context"] = options.model.context;
  json["last"] = options.last;
  json["perplexity"] = all.perplexity();
  json["standard_error"] = all.standard_error();
  json["mean_loss"] = all.mean();
  json["kept_fraction"] = mean_of(rows, "kept_fraction");
  json["mass_recall"] = mean_of(rows, "mass_recall");
  json["machine"] = bench::machine(engine.threads());
  json["windows"] = std::move(rows);
  std::printf("%s\n", json.dump().c_str());
  return kOk;
}

}  // namespace

void add_perplexity(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PerplexityOptions>();
  CLI::App* command = app.add_subcommand(
      "perplexity", "Measure how well the end of long windows of a text is predicted");
  add_model_options(*command, options->model);
  command->get_option("-c")->required()->description("Tokens of a window");
  command->add_option("-f,--file", options->file, "Text file; - is standard input")->required();
  command->add_option("--last", options->last, "Tokens scored at the end of each window, below -c")
      ->check(integer_between(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--windows", options->windows, "Windows, spread evenly over the text")
      ->check(integer_between(1, 1 << 20))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object instead of the table");
  command->footer(
      "Examples:\n"
      "  minference perplexity -m model.gguf -f book.txt -c 8192 --attn dense\n"
      "  minference perplexity -m model.gguf -f book.txt -c 32768 --last 1024 --windows 4 \\\n"
      "      --attn vertical_slash --attn-opt vertical_size=800 --guard report --json");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace minference::cli

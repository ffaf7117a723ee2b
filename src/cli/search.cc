// minference search: a pattern file for a model, from its own attention on a real text.
#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/prompt_file.h"
#include "cli/search_report.h"
#include "cli/stop_signal.h"
#include "core/replace_file.h"
#include "llama/engine.h"
#include "llama/model_file.h"
#include "minference/error.h"
#include "minference/search.h"
#include "minference/version.h"

namespace minference::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using llama_host::AttentionCall;
using llama_host::Engine;
using llama_host::Token;

// Tokens that a search takes unless it is told: as many as the reference's patterns were found on,
// and no fewer than make a long prompt.
constexpr std::int64_t kMostTokens = 32768;
constexpr std::int64_t kFewestTokens = 8192;

constexpr std::size_t kCosts = 5;

struct SearchOptions {
  std::string model;
  std::string text;
  std::string output;
  std::string report;
  std::int64_t tokens = 0;  // 0: not given
  double budget = 0.25;
  bool equal = false;
  std::int64_t rows = 16;
  std::int64_t chunk = 2048;
  std::vector<double> costs;
  bool calibrate = false;
  bool restart = false;
  std::int64_t threads = 0;  // 0: not given
};

// The state of a search beside its output, so that an interrupted one goes on where it was.
class Checkpoint {
 public:
  Checkpoint(PatternSearch& search, std::string path, std::string purpose)
      : search_(search), path_(std::move(path)), purpose_(std::move(purpose)) {}

  // Takes up a saved state, if there is one.
  bool restore() {
    std::ifstream file(path_, std::ios::binary);
    if (!file) return false;
    const std::string state{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    try {
      search_.restore(state, purpose_);
    } catch (const InvalidArgument& e) {
      throw InvalidArgument(path_ + ": " + e.what() + "; --restart begins a new one");
    }
    return true;
  }

  // After a chunk was added.
  void changed() {
    changed_ = true;
    if (Clock::now() - saved_ > kInterval) save();
  }

  void save() {
    if (!changed_) return;
    replace_file(path_, search_.state(purpose_));
    saved_ = Clock::now();
    changed_ = false;
  }

  void remove() const { fs::remove(path_); }

 private:
  static constexpr std::chrono::seconds kInterval{10};

  PatternSearch& search_;
  std::string path_;
  std::string purpose_;
  bool changed_ = false;
  Clock::time_point saved_ = Clock::now();
};

std::vector<Token> prompt_of(const SearchOptions& options, const Engine& engine,
                             const std::string& text) {
  std::vector<Token> tokens = engine.tokenize(text);
  const auto size = static_cast<std::int64_t>(tokens.size());
  const std::int64_t trained = engine.model().trained_context;
  std::int64_t wanted = options.tokens;
  if (wanted == 0) {
    wanted = std::clamp(size, std::min(kFewestTokens, trained), std::min(kMostTokens, trained));
  }
  if (size < wanted) {
    throw InvalidArgument("the text has " + std::to_string(size) + " tokens, the search needs " +
                          std::to_string(wanted) + "; --tokens takes " +
                          std::to_string(kMinSearchTokens) + " and more");
  }
  if (wanted > trained) {
    throw InvalidArgument("--tokens is " + std::to_string(wanted) + "; " + engine.model().name +
                          " was trained for a context of " + std::to_string(trained));
  }
  tokens.resize(static_cast<std::size_t>(wanted));
  return tokens;
}

// What a saved state must agree with beside the sizes that it holds itself.
std::string purpose_of(const SearchOptions& options, const std::vector<Token>& tokens) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const Token token : tokens) {
    hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x100000001b3ULL;
  }
  return std::string(version()) + ' ' + fs::path(options.model).filename().string() + ' ' +
         std::to_string(fs::file_size(options.model)) + ' ' +
         std::to_string(fs::last_write_time(options.model).time_since_epoch().count()) + ' ' +
         std::to_string(hash) + ' ' + std::to_string(options.chunk);
}

// Runs the prompt through the model, exactly, and every chunk of every layer through the search.
// Returns the size of a head.
std::int64_t measure(Engine& engine, const std::vector<Token>& tokens, PatternSearch& search,
                     Checkpoint& checkpoint) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  const std::int64_t layers = engine.model().layers;
  std::int64_t head_dim = 0;
  Progress progress(total, "search");
  engine.observe([&](const AttentionCall& call) {
    if (call.layer < 0) throw Unsupported("the plug-in cannot tell the layers of this model");
    head_dim = call.input->k.dim();
    if (search.add_chunk(call.layer, *call.input, *call.params)) checkpoint.changed();
    const std::int64_t rows = call.input->q.tokens();
    progress.update(call.input->k.tokens() - rows + rows * (call.layer + 1) / layers, std::nullopt);
  });
  try {
    engine.prefill(tokens);
  } catch (...) {
    checkpoint.save();
    throw;
  }
  engine.observe({});
  checkpoint.save();
  return head_dim;
}

SearchCosts costs_of(const SearchOptions& options, std::int64_t head_dim) {
  if (options.calibrate) return measure_search_costs(head_dim, static_cast<int>(options.threads));
  SearchCosts costs;
  if (options.costs.empty()) return costs;
  double* const fields[kCosts] = {&costs.runs, &costs.columns, &costs.window, &costs.blocks,
                                  &costs.estimate};
  for (std::size_t i = 0; i < kCosts; ++i) *fields[i] = options.costs[i];
  return costs;
}

int run(const SearchOptions& options) {
  const std::atomic<bool>& stop = install_stop_signal();
  const std::string partial = options.output + ".partial";
  llama_host::check_model_file(options.model);
  const std::string text = read_prompt_file(options.text);
  for (const std::string& path : {options.output, partial, options.report}) {
    if (!path.empty()) check_replaceable(path);
  }

  llama_host::EngineOptions engine_options;
  engine_options.model_path = options.model;
  engine_options.attention.attn = "dense";
  engine_options.ubatch = static_cast<int>(options.chunk);
  engine_options.threads = static_cast<int>(options.threads);
  engine_options.stop = &stop;
  Engine engine(engine_options);
  const std::vector<Token> tokens = prompt_of(options, engine, text);
  const auto total = static_cast<std::int64_t>(tokens.size());
  engine.open_context(total);

  PatternSearch search(engine.model().layers, engine.model().heads, total, options.rows);
  Checkpoint checkpoint(search, partial, purpose_of(options, tokens));
  if (options.restart) checkpoint.remove();
  if (checkpoint.restore()) {
    std::fprintf(stderr, "minference: going on with the search saved in %s\n", partial.c_str());
  }
  std::int64_t head_dim = 0;
  try {
    head_dim = measure(engine, tokens, search, checkpoint);
  } catch (const llama_host::Interrupted&) {
    std::fprintf(stderr, "minference: interrupted; the same command goes on from %s\n",
                 partial.c_str());
    throw;
  }

  SearchReport report;
  report.model = engine.model().name;
  report.tokens = total;
  report.chunk = options.chunk;
  report.rows = options.rows;
  report.candidates = search.candidates();
  report.budget = options.budget;
  report.share = options.equal ? BudgetShare::kEqual : BudgetShare::kShared;
  report.costs = costs_of(options, head_dim);
  report.choices = search.choose(report.costs, report.budget, report.share);
  if (report.choices.empty()) {
    throw Unsupported(report.model + ": no layer computes causal attention that patterns serve");
  }
  PatternFile file(engine.model().layers);
  for (const HeadChoice& choice : report.choices) {
    file.set(choice.layer, choice.head, choice.pattern);
  }
  if (!options.report.empty()) replace_file(options.report, search_json(report));
  file.save(options.output);
  checkpoint.remove();
  std::printf("%s", search_table(report).c_str());
  return kOk;
}

}  // namespace

void add_search(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SearchOptions>();
  CLI::App* command =
      app.add_subcommand("search", "Find the best attention pattern of every head of a model");
  command->add_option("-m,--model", options->model, "Model file (GGUF)")->required();
  command->add_option("-f,--file", options->text, "Text to search on; - is standard input")
      ->required();
  command->add_option("-o,--output", options->output, "Pattern file (JSON) to write")->required();
  command->add_option("--report", options->report,
                      "Also write every head's pattern, recall and cost to this file (JSON)");
  command
      ->add_option("--budget", options->budget,
                   "Cost of all heads as a share of dense attention's, at the length of the text:\n"
                   "less is faster, more keeps more")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command->add_flag("--equal", options->equal,
                    "Hold every head to the budget, instead of all heads together");
  command
      ->add_option("--tokens", options->tokens,
                   "Tokens of the text (default: all, at most 32768 or the model's context)")
      ->check(integer_between(kMinSearchTokens, 1 << 24));
  command->add_option("--rows", options->rows, "Query rows sampled of each chunk and head")
      ->check(integer_between(1, kMaxSearchRows))
      ->capture_default_str();
  command
      ->add_option("--ubatch", options->chunk,
                   "Tokens of a prefill step; patterns are measured for steps of this size")
      ->check(integer_between(kRowBlock, 16384))
      ->capture_default_str();
  CLI::Option* costs =
      command
          ->add_option(
              "--costs", options->costs,
              "What a pair costs beside one of dense attention, five numbers: on diagonals,\n"
              "in columns, in windows, in blocks, in estimates")
          ->delimiter(',')
          ->expected(static_cast<int>(kCosts))
          ->check(number_between(0.0, 1000.0));
  command->add_flag("--calibrate", options->calibrate, "Measure these on this device")
      ->excludes(costs);
  command->add_flag("--restart", options->restart, "Forget what an interrupted search has saved");
  command->add_option("-t,--threads", options->threads, "Threads (default: one per core)")
      ->check(integer_between(1, 512));
  command->footer(
      "An interrupted search goes on where it was when the same command is given again.\n"
      "Examples:\n"
      "  minference search -m model.gguf -f book.txt -o pattern.json\n"
      "  minference search -m model.gguf -f book.txt -o pattern.json --budget 0.15 \\\n"
      "      --calibrate --report report.json\n"
      "  minference run -m model.gguf -f other.txt --pattern pattern.json --guard report");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace minference::cli

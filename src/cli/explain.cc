// minference explain: one prefill, and a report of what attention did in it.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/model_prompt.h"
#include "cli/model_run.h"
#include "cli/options.h"
#include "cli/png.h"
#include "cli/progress.h"
#include "cli/report_folder.h"
#include "cli/segment_option.h"
#include "cli/stop_signal.h"
#include "core/stopwatch.h"
#include "explain/report.h"
#include "explain/report_pictures.h"
#include "llama/engine.h"
#include "llama/model_file.h"
#include "llama/plugin_config.h"
#include "minference/error.h"

namespace minference::cli {
namespace {

using explain::AttentionCall;
using explain::AttentionFigures;
using explain::ExplainReport;
using explain::HeadId;
using explain::ReportFile;
using explain::ShownHead;
using llama_host::Engine;
using llama_host::PluginTotals;

struct ExplainOptions {
  ModelOptions model;
  PromptOptions prompt;
  std::string output;
  std::string heads;
  std::vector<std::string> segments;
  bool force = false;
  bool text = false;
  bool json = false;
};

// What both prefills share.
class Explainer {
 public:
  Explainer(const ExplainOptions& options, Engine& engine, std::vector<llama_host::Token> tokens)
      : options_(options),
        engine_(engine),
        tokens_(std::move(tokens)),
        figures_(engine.model().layers, engine.model().heads) {}

  // The prefill that is timed; `shown` gets its maps in passing.
  void measure(std::vector<ShownHead>& shown) {
    double observing = 0;
    prefill("prefill", [&](const AttentionCall& call) {
      const Stopwatch watch;
      figures_.add(call, options_.model.guard_rows);
      add_maps(shown, call);
      observing += watch.seconds();
    });
    // The first token is sampled, not decoded further.
    ttft_seconds_ = engine_.generate({}, 1).first_token_seconds - observing;
    totals_ = *engine_.plugin_totals();
    check_seen();
  }

  // Once more, for maps of heads that are known only now.
  void add_maps_of(std::vector<ShownHead>& shown) {
    open_context();
    prefill("pictures", [&](const AttentionCall& call) { add_maps(shown, call); });
  }

  void open_context() {
    const auto tokens = static_cast<std::int64_t>(tokens_.size());
    const std::int64_t given = options_.model.context;
    engine_.open_context(given > 0 ? given : context_for(engine_, tokens, 1));
  }

  const AttentionFigures& figures() const { return figures_; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(tokens_.size()); }

  void fill(ExplainReport& report) const {
    report.prompt_tokens = tokens();
    report.figures = figures_;
    report.isa = totals_.isa.value_or("unknown");
    report.ttft_seconds = ttft_seconds_;
    const double rest = ttft_seconds_ - totals_.linear_seconds - totals_.kernel_seconds -
                        totals_.index_seconds - totals_.guard_seconds;
    report.stages = {
        {"linear", "matrix products", "the model's weights times the prompt, on our kernels",
         totals_.linear_seconds},
        {"attention", "attention kernels", "scores, softmax and values of the kept keys",
         totals_.kernel_seconds},
        {"index", "index", "finding out which keys each head needs", totals_.index_seconds},
        {"guard", "guard", "checking on sampled rows what was lost (--guard)",
         totals_.guard_seconds},
        {"rest", "rest",
         "llama.cpp: normalisation, activations, KV cache, products that it kept; reading masks",
         std::max(0.0, rest)}};
    for (const auto& [reason, times] : totals_.fallbacks) {
      report.notes.push_back("computed exactly, " + std::to_string(times) + " times: " + reason);
    }
    for (const std::string& reason : totals_.declined) {
      report.notes.push_back("left to llama.cpp: " + reason);
    }
  }

 private:
  void prefill(const char* label, std::function<void(const AttentionCall&)> observer) {
    engine_.observe(std::move(observer));
    Progress progress(tokens(), label);
    engine_.prefill(tokens_, [&](std::int64_t done) {
      progress.update(done, engine_.plugin_totals()->kept_fraction);
    });
    engine_.observe({});
  }

  void check_seen() const {
    if (figures_.total().steps > 0) return;
    std::string reasons;
    for (const std::string& reason : totals_.declined) reasons += "; left to llama.cpp: " + reason;
    for (const auto& [reason, times] : totals_.fallbacks) reasons += "; " + reason;
    if (!reasons.empty()) {
      throw Unsupported("no attention of this model can be explained" + reasons);
    }
    // What the plug-in leaves to llama.cpp because it is small.
    const llama_host::PluginConfig config;
    throw InvalidArgument("the prompt has " + std::to_string(tokens()) +
                          " tokens, too few to explain; legal: " +
                          std::to_string(std::max(config.min_rows, config.min_kv)) + " or more");
  }

  const ExplainOptions& options_;
  Engine& engine_;
  std::vector<llama_host::Token> tokens_;
  AttentionFigures figures_;
  PluginTotals totals_;
  double ttft_seconds_ = 0;
};

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string prompt_name(const PromptOptions& prompt) {
  if (prompt.file.empty()) return "the prompt of the command line";
  if (prompt.file == "-") return "standard input";
  return std::filesystem::path(prompt.file).filename().string();
}

void write_report(const ExplainOptions& options, const ExplainReport& report,
                  ReportFolder& folder) {
  if (options.json) {
    constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
    folder.write("report.json", report_json(report).dump(2, ' ', false, kReplace) + "\n");
  }
  for (const ReportFile& file : report_files(report, encode_png))
    folder.write(file.name, file.content);
  folder.publish(explain::is_head_picture);
}

int run(const CLI::App& command, const ExplainOptions& options) {
  if (options.output.empty() && !options.text) {
    throw InvalidArgument("explain needs a place for the report: -o folder, --text or both");
  }
  if (options.model.attn == llama_host::kStock) {
    throw InvalidArgument("explain shows what our attention does, and --attn stock has none");
  }
  const std::atomic<bool>& stop = install_stop_signal();
  const std::vector<HeadId> asked =
      options.heads.empty() ? std::vector<HeadId>{} : explain::parse_heads(options.heads);
  std::vector<Segment> segments = parse_segments(options.segments);
  llama_host::check_model_file(options.model.model);
  const std::string prompt = read_prompt(command, options.prompt);
  std::unique_ptr<ReportFolder> folder;
  if (!options.output.empty()) {
    folder = std::make_unique<ReportFolder>(options.output, options.force);
  }

  Engine engine(engine_options(options.model, stop));
  engine.set_segments(std::move(segments));
  check_heads(asked, engine.model().layers, engine.model().heads);
  const std::string text = render_prompt(engine, options.prompt, prompt);
  const Stopwatch tokenise_watch;
  std::vector<llama_host::Token> tokens = engine.tokenize(text);
  const double tokenise_seconds = tokenise_watch.seconds();
  Explainer explainer(options, engine, std::move(tokens));
  explainer.open_context();
  for (const std::string& warning : engine.warnings()) warn(warning);
  const double load_seconds = engine.load_seconds();

  std::vector<ShownHead> shown = empty_maps(asked, explainer.tokens());
  explainer.measure(shown);
  if (folder && shown.empty()) {
    shown = empty_maps(explainer.figures().telling_heads(), explainer.tokens());
    explainer.add_maps_of(shown);
  }

  ExplainReport report;
  report.model = engine.model().name;
  report.prompt = prompt_name(options.prompt);
  report.step_tokens = options.model.ubatch;
  report.method = options.model.attn;
  report.options = joined(options.model.attn_opts);
  report.segments = joined(options.segments);
  report.guard = options.model.guard;
  report.guard_rows = options.model.guard_rows;
  report.threads = engine.threads();
  report.load_seconds = load_seconds;
  report.tokenise_seconds = tokenise_seconds;
  report.heads = std::move(shown);
  explainer.fill(report);
  if (!options.model.pattern.empty()) {
    report.patterns = std::make_shared<const PatternFile>(PatternFile::load(options.model.pattern));
  }
  if (folder) {
    write_report(options, report, *folder);
    std::fprintf(stderr, "wrote %s\n",
                 (std::filesystem::path(folder->path()) / "index.html").c_str());
  }
  if (options.text) print_report(report, stdout);
  return kOk;
}

}  // namespace

void add_explain(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand(
      "explain", "Report which keys attention kept for a prompt, and what it lost, in pictures");
  add_model_options(*command, options->model);
  add_prompt_options(*command, options->prompt);
  CLI::Option* output = command->add_option("-o,--output", options->output,
                                            "Folder for the report: index.html and its pictures");
  command->add_flag("--force", options->force, "Write into a folder that is not empty")
      ->needs(output);
  command
      ->add_option(
          "--heads", options->heads,
          "Heads to show in detail as layer:head,layer:head (default: those with the lowest\n"
          "recall and some typical ones)")
      ->needs(output);
  add_segment_option(*command, options->segments);
  command->add_flag("--text", options->text, "Print tables; without -o, instead of a report");
  command->add_flag("--json", options->json, "Also write report.json into the folder")
      ->needs(output);
  command->footer(
      "Recall is always measured, on --guard-rows rows of each step; it takes no part in the "
      "times.\n"
      "Examples:\n"
      "  minference explain -m model.gguf -f book.txt -o report --attn vertical_slash \\\n"
      "      --attn-opt vertical_size=100 --attn-opt slash_size=800\n"
      "  minference explain -m model.gguf -f book.txt -o report --heads 0:3,12:5 --force\n"
      "  minference explain -m model.gguf -f frames.txt -o report --attn mminference \\\n"
      "      --segments 35:8227:visual:256\n"
      "  minference explain -m model.gguf -f book.txt --attn flexprefill --text");
  command->callback([options, command, &exit_code] { exit_code = run(*command, *options); });
}

}  // namespace minference::cli

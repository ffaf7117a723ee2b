// minference run: a prompt, an answer; or many of them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/model_prompt.h"
#include "cli/model_run.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/prompt_lines.h"
#include "cli/segment_option.h"
#include "cli/stop_signal.h"
#include "core/stopwatch.h"
#include "llama/engine.h"
#include "llama/model_file.h"
#include "llama/plugin_config.h"

namespace minference::cli {
namespace {

using llama_host::Engine;
using llama_host::Generation;
using llama_host::PluginTotals;

struct RunOptions {
  ModelOptions model;
  PromptOptions prompt;
  std::string prompts;  // file of many
  std::vector<std::string> segments;
  std::int64_t tokens = 64;
  llama_host::SamplingOptions sampling;
  bool count_tokens = false;
  bool json = false;
  bool verbose = false;

  bool many() const { return !prompts.empty(); }
};

// A prompt ready to be computed.
struct Request {
  PromptLine line;
  std::vector<llama_host::Token> tokens;
  std::int64_t answer_tokens = 0;
};

struct RunResult {
  std::int64_t prompt_tokens = 0;
  double prefill_seconds = 0;
  Generation generation;
  std::optional<PluginTotals> totals;
};

std::vector<PromptLine> read_prompts(const CLI::App& command, const RunOptions& options) {
  if (options.many()) return read_prompt_lines(options.prompts);
  PromptLine line;
  line.prompt = read_prompt(command, options.prompt);
  return {std::move(line)};
}

bool wants_chat(const RunOptions& options, const PromptLine& line) {
  return line.chat.value_or(!options.prompt.no_chat);
}

std::string render(const Engine& engine, const RunOptions& options, const PromptLine& line) {
  if (!wants_chat(options, line) || !engine.model().has_chat_template) return line.prompt;
  return engine.apply_chat_template(line.system.value_or(options.prompt.system), line.prompt);
}

// Says which of many prompts an error is about.
template <class Check>
void check_request(const RunOptions& options, const Request& request, const Check& check) {
  if (!options.many()) return check();
  try {
    check();
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(request.line.origin + ": " + e.what());
  }
}

// One context that holds each of the prompts, checked before the first is computed.
void open_context(Engine& engine, const RunOptions& options, const std::vector<Request>& requests) {
  std::int64_t size = options.model.context;
  if (size == 0) {
    for (const Request& request : requests) {
      check_request(options, request, [&] {
        const auto prompt = static_cast<std::int64_t>(request.tokens.size());
        size = std::max(size, context_for(engine, prompt, request.answer_tokens));
      });
    }
  }
  engine.open_context(size);
  for (const std::string& warning : engine.warnings()) warn(warning);
  for (const Request& request : requests) {
    check_request(options, request, [&] { engine.check_prompt(request.tokens); });
  }
}

// Steps after the first token, which prefill paid for.
double decode_rate(const Generation& generation) {
  const auto steps = static_cast<std::int64_t>(generation.tokens.size()) - 1;
  return steps > 0 ? tokens_per_second(steps, generation.decode_seconds) : 0.0;
}

void print_json(const RunOptions& options, const Engine& engine, const Request& request,
                const RunResult& result) {
  nlohmann::ordered_json json;
  if (options.many()) json["id"] = request.line.id;
  json["model"] = engine.model().name;
  json["method"] = options.model.attn;
  json["prompt_tokens"] = result.prompt_tokens;
  json["answer_tokens"] = result.generation.tokens;
  json["answer"] = result.generation.text;
  json["load_seconds"] = engine.load_seconds();
  json["ttft_seconds"] = result.generation.first_token_seconds;
  json["prefill_tokens_per_second"] =
      tokens_per_second(result.prompt_tokens, result.prefill_seconds);
  json["decode_tokens_per_second"] = decode_rate(result.generation);
  json["threads"] = engine.threads();
  add_totals(json, result.totals);
  std::printf("%s\n", json.dump().c_str());
  std::fflush(stdout);
}

void print_attention(const RunOptions& options, const RunResult& result) {
  if (!result.totals) {
    std::fprintf(stderr, "attention  stock llama.cpp\n");
    return;
  }
  const PluginTotals& totals = *result.totals;
  if (!totals.kept_fraction) {
    std::fprintf(stderr,
                 "attention  %s: no prompt batch was large enough, llama.cpp computed all\n",
                 options.model.attn.c_str());
  } else {
    std::fprintf(
        stderr,
        "attention  %s, kernels %s: %.1f %% of the causal area kept, %.2f s (index %.2f s)\n",
        options.model.attn.c_str(), totals.isa->c_str(), 100.0 * *totals.kept_fraction,
        totals.attention_seconds, totals.index_seconds);
  }
  if (totals.linear_seconds > 0) {
    std::fprintf(stderr, "products   %.2f s in our matrix products\n", totals.linear_seconds);
  }
  if (totals.mass_recall) {
    std::fprintf(stderr, "recall     %.2f %% of the softmax mass kept, on sampled rows (%.2f s)\n",
                 100.0 * *totals.mass_recall, totals.guard_seconds);
  }
  for (const auto& [reason, times] : totals.fallbacks) {
    std::fprintf(stderr, "fallback   exact attention, %lld times: %s\n",
                 static_cast<long long>(times), reason.c_str());
  }
  for (const std::string& reason : totals.declined) {
    std::fprintf(stderr, "declined   left to llama.cpp: %s\n", reason.c_str());
  }
}

void print_summary(const RunOptions& options, const Engine& engine, const RunResult& result) {
  const Generation& generation = result.generation;
  std::fprintf(stderr, "\nmodel      %s, %d threads, loaded in %.2f s\n",
               engine.model().name.c_str(), engine.threads(), engine.load_seconds());
  std::fprintf(stderr, "prompt     %lld tokens, first token after %.2f s, %.0f tokens/s\n",
               static_cast<long long>(result.prompt_tokens), generation.first_token_seconds,
               tokens_per_second(result.prompt_tokens, result.prefill_seconds));
  std::fprintf(stderr, "answer     %zu tokens, %.1f tokens/s%s\n", generation.tokens.size(),
               decode_rate(generation),
               generation.context_full ? ", stopped: the context is full" : "");
  print_attention(options, result);
}

void print_count(const RunOptions& options, const Engine& engine, const Request& request) {
  const std::size_t count = request.tokens.size();
  if (!options.json && !options.many()) {
    std::printf("%zu\n", count);
    return;
  }
  nlohmann::ordered_json json;
  if (options.many()) json["id"] = request.line.id;
  json["prompt_tokens"] = count;
  json["trained_context"] = engine.model().trained_context;
  std::printf("%s\n", json.dump().c_str());
}

void answer(Engine& engine, const RunOptions& options, const Request& request) {
  const bool json = options.json || options.many();
  RunResult result;
  result.prompt_tokens = static_cast<std::int64_t>(request.tokens.size());
  {
    Progress progress(result.prompt_tokens);
    const Stopwatch watch;
    engine.prefill(request.tokens, [&](std::int64_t done) {
      const auto totals = engine.plugin_totals();
      progress.update(done, totals ? totals->kept_fraction : std::nullopt);
    });
    result.prefill_seconds = watch.seconds();
  }
  result.generation =
      engine.generate(options.sampling, request.answer_tokens, [&](std::string_view text) {
        if (json) return;
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
      });
  result.totals = engine.plugin_totals();
  if (json) {
    print_json(options, engine, request, result);
  } else {
    std::printf("\n");
    print_summary(options, engine, result);
  }
}

int run(const CLI::App& command, const RunOptions& options) {
  const std::atomic<bool>& stop = install_stop_signal();
  llama_host::check_model_file(options.model.model);
  std::vector<Segment> segments = parse_segments(options.segments);
  std::vector<Request> requests;
  for (PromptLine& line : read_prompts(command, options)) {
    const std::int64_t tokens = line.tokens.value_or(options.tokens);
    requests.push_back({std::move(line), {}, tokens});
  }

  llama_host::EngineOptions setup = engine_options(options.model, stop);
  setup.verbose = options.verbose;
  const char* log = std::getenv("MINFERENCE_LOG");
  setup.layer_table = options.verbose || (log != nullptr && std::strcmp(log, "1") == 0);
  Engine engine(setup);
  engine.set_segments(std::move(segments));

  const bool chat = std::any_of(requests.begin(), requests.end(), [&](const Request& request) {
    return wants_chat(options, request.line);
  });
  if (chat && !engine.model().has_chat_template) {
    warn(engine.model().name + " has no chat template; prompts are used as they are");
  }
  for (Request& request : requests) {
    request.tokens = engine.tokenize(render(engine, options, request.line));
  }
  if (options.count_tokens) {
    for (const Request& request : requests) print_count(options, engine, request);
    return kOk;
  }
  open_context(engine, options, requests);
  for (const Request& request : requests) answer(engine, options, request);
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Answer a prompt, or many");
  add_model_options(*command, options->model);
  add_prompt_options(*command, options->prompt);
  CLI::Option* many =
      command
          ->add_option(
              "--prompts", options->prompts,
              "File of many prompts, - is standard input: a JSON object a line with prompt "
              "and,\nif wanted, id, tokens, system, chat; prints a JSON object for each")
          ->excludes(command->get_option("-f"))
          ->excludes(command->get_option("-p"));
  command->add_option("-n,--tokens", options->tokens, "Most tokens of the answer")
      ->check(integer_between(1, kMaxAnswerTokens))
      ->capture_default_str();
  command->add_option("--temp", options->sampling.temperature, "Temperature; 0 is greedy")
      ->check(number_between(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "Sample among the k best; 0 is all")
      ->check(integer_between(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--top-p", options->sampling.top_p, "Sample among this much probability")
      ->check(number_between(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Seed of the sampling")
      ->check(integer_between(0, 0xFFFFFFFFLL))
      ->capture_default_str();
  add_segment_option(*command, options->segments)->excludes(many);
  command->add_flag("--count-tokens", options->count_tokens,
                    "Only print how many tokens the prompt has, chat template included");
  command->add_flag("--json", options->json, "Print one JSON object instead of text");
  command->add_flag("-v,--verbose", options->verbose, "llama.cpp's log and a table per layer");
  command->footer(
      "Examples:\n"
      "  minference run -m model.gguf -f book.txt -n 128\n"
      "  cat book.txt | minference run -m model.gguf -f - --attn vertical_slash \\\n"
      "      --attn-opt vertical_size=500 --attn-opt slash_size=700 --guard report\n"
      "  minference run -m model.gguf -f frames.txt --attn mminference \\\n"
      "      --segments 35:8227:visual:256\n"
      "  minference run -m model.gguf -p 'Hello' --attn stock --json\n"
      "  minference run -m model.gguf --prompts questions.jsonl > answers.jsonl");
  command->callback([options, command, &exit_code] { exit_code = run(*command, *options); });
}

}  // namespace minference::cli

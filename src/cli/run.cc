// minference run: one prompt, one answer.
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/prompt_file.h"
#include "cli/segment_option.h"
#include "cli/stop_signal.h"
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
  std::string prompt;
  std::string prompt_file;
  std::string system;
  bool no_chat = false;
  std::vector<std::string> segments;
  std::int64_t tokens = 64;
  llama_host::SamplingOptions sampling;
  bool count_tokens = false;
  bool json = false;
  bool verbose = false;
};

struct RunResult {
  std::int64_t prompt_tokens = 0;
  double prefill_seconds = 0;
  Generation generation;
  std::optional<PluginTotals> totals;
};

std::string read_prompt(const RunOptions& options) {
  if (!options.prompt_file.empty()) return read_prompt_file(options.prompt_file);
  check_prompt(options.prompt, "the prompt");
  return options.prompt;
}

void warn(const std::string& text) {
  std::fprintf(stderr, "minference: warning: %s\n", text.c_str());
}

std::string render(const Engine& engine, const RunOptions& options, const std::string& prompt) {
  if (options.no_chat) return prompt;
  if (!engine.model().has_chat_template) {
    warn(engine.model().name + " has no chat template; the prompt is used as it is");
    return prompt;
  }
  return engine.apply_chat_template(options.system, prompt);
}

// Room for the prompt and the answer, as far as the model was trained for it.
std::int64_t context_for(const RunOptions& options, const Engine& engine, std::int64_t prompt) {
  if (options.model.context > 0) return options.model.context;
  const std::int64_t trained = engine.model().trained_context;
  if (prompt > trained) {
    throw InvalidArgument("the prompt has " + std::to_string(prompt) + " tokens, " +
                          engine.model().name + " was trained for a context of " +
                          std::to_string(trained) + "; -c sets a larger one");
  }
  return std::min(prompt + options.tokens, trained);
}

double rate(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
}

// Steps after the first token, which prefill paid for.
double decode_rate(const Generation& generation) {
  const auto steps = static_cast<std::int64_t>(generation.tokens.size()) - 1;
  return steps > 0 ? rate(steps, generation.decode_seconds) : 0.0;
}

template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

void print_json(const RunOptions& options, const Engine& engine, const RunResult& result) {
  nlohmann::ordered_json json;
  json["model"] = engine.model().name;
  json["method"] = options.model.attn;
  json["prompt_tokens"] = result.prompt_tokens;
  json["answer_tokens"] = result.generation.tokens;
  json["answer"] = result.generation.text;
  json["load_seconds"] = engine.load_seconds();
  json["ttft_seconds"] = result.generation.first_token_seconds;
  json["prefill_tokens_per_second"] = rate(result.prompt_tokens, result.prefill_seconds);
  json["decode_tokens_per_second"] = decode_rate(result.generation);
  json["kept_fraction"] = nullptr;
  json["mass_recall"] = nullptr;
  json["index_seconds"] = nullptr;
  json["guard_seconds"] = nullptr;
  json["attention_seconds"] = nullptr;
  json["linear_seconds"] = nullptr;
  json["threads"] = engine.threads();
  json["isa"] = nullptr;
  json["fallbacks"] = nlohmann::ordered_json::object();
  json["declined"] = nlohmann::ordered_json::array();
  if (result.totals) {
    json["kept_fraction"] = or_null(result.totals->kept_fraction);
    json["mass_recall"] = or_null(result.totals->mass_recall);
    json["index_seconds"] = result.totals->index_seconds;
    json["guard_seconds"] = result.totals->guard_seconds;
    json["attention_seconds"] = result.totals->attention_seconds;
    json["linear_seconds"] = result.totals->linear_seconds;
    json["isa"] = or_null(result.totals->isa);
    json["fallbacks"] = result.totals->fallbacks;
    json["declined"] = result.totals->declined;
  }
  std::printf("%s\n", json.dump().c_str());
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
               rate(result.prompt_tokens, result.prefill_seconds));
  std::fprintf(stderr, "answer     %zu tokens, %.1f tokens/s%s\n", generation.tokens.size(),
               decode_rate(generation),
               generation.context_full ? ", stopped: the context is full" : "");
  print_attention(options, result);
}

int run(const RunOptions& options) {
  const std::atomic<bool>& stop = install_stop_signal();
  llama_host::check_model_file(options.model.model);
  const std::string prompt = read_prompt(options);
  std::vector<Segment> segments = parse_segments(options.segments);

  llama_host::EngineOptions engine_options;
  engine_options.model_path = options.model.model;
  engine_options.attention = options.model.attention();
  engine_options.ubatch = static_cast<int>(options.model.ubatch);
  engine_options.threads = static_cast<int>(options.model.threads);
  engine_options.verbose = options.verbose;
  const char* log = std::getenv("MINFERENCE_LOG");
  engine_options.layer_table = options.verbose || (log != nullptr && std::strcmp(log, "1") == 0);
  engine_options.stop = &stop;
  Engine engine(engine_options);
  engine.set_segments(std::move(segments));

  const std::vector<llama_host::Token> tokens = engine.tokenize(render(engine, options, prompt));
  if (options.count_tokens) {
    std::printf(options.json ? "{\"prompt_tokens\": %zu}\n" : "%zu\n", tokens.size());
    return kOk;
  }
  RunResult result;
  result.prompt_tokens = static_cast<std::int64_t>(tokens.size());
  engine.open_context(context_for(options, engine, result.prompt_tokens));
  for (const std::string& warning : engine.warnings()) warn(warning);
  {
    Progress progress(result.prompt_tokens);
    const auto start = std::chrono::steady_clock::now();
    engine.prefill(tokens, [&](std::int64_t done) {
      const auto totals = engine.plugin_totals();
      progress.update(done, totals ? totals->kept_fraction : std::nullopt);
    });
    result.prefill_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  result.generation = engine.generate(options.sampling, options.tokens, [&](std::string_view text) {
    if (options.json) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  result.totals = engine.plugin_totals();
  if (options.json) {
    print_json(options, engine, result);
  } else {
    std::printf("\n");
    print_summary(options, engine, result);
  }
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Answer one prompt");
  add_model_options(*command, options->model);
  CLI::Option* file =
      command->add_option("-f,--file", options->prompt_file, "Prompt file; - is standard input");
  command->add_option("-p,--prompt", options->prompt, "Prompt text")->excludes(file);
  command->add_option("-n,--tokens", options->tokens, "Most tokens of the answer")
      ->check(integer_between(1, 1 << 20))
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
  command->add_flag("--no-chat", options->no_chat, "Use the prompt without the chat template");
  command->add_option("--system", options->system, "System message of the chat template");
  command
      ->add_option(
          "--segments", options->segments,
          "Visual tokens of the prompt, as begin:end:visual[:tokens of a frame], the first\n"
          "token being 0; several are separated by commas. For the method " +
              llama_host::segment_method_names())
      ->delimiter(',')
      ->allow_extra_args(false);
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
      "  minference run -m model.gguf -p 'Hello' --attn stock --json");
  command->callback([options, command, &exit_code] {
    if (command->count("-f") == 0 && command->count("-p") == 0) {
      throw InvalidArgument("run needs a prompt: -p text, -f file or -f -");
    }
    exit_code = run(*options);
  });
}

}  // namespace minference::cli

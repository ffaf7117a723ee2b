// Engine: one model and one context of llama.cpp with our plug-in in place, for the command line.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llama/failure.h"
#include "llama/plugin_config.h"
#include "llama/plugin_loader.h"
#include "minference/method.h"

struct llama_context;
struct llama_model;
struct llama_vocab;

namespace minference::llama_host {

using Token = std::int32_t;

// How attention is to be computed; the same names and values as the MINFERENCE_* variables.
struct AttentionOptions {
  std::string attn = default_method(false);
  MethodOptions options;
  std::string pattern;  // path, or empty
  std::string precision = "auto";
  std::string guard = "off";  // report, enforce
  std::int64_t guard_rows = 16;
  double min_recall = 0.90;
  std::string linear = "1";
};

struct EngineOptions {
  std::string model_path;
  AttentionOptions attention;
  int ubatch = 2048;                        // tokens of a prefill step
  int threads = 0;                          // 0: one per core
  bool verbose = false;                     // llama.cpp's own log on stderr
  bool layer_table = false;                 // the plug-in's table on stderr at exit
  const std::atomic<bool>* stop = nullptr;  // asked during every step
};

struct SamplingOptions {
  float temperature = 0.0F;  // 0: greedy
  int top_k = 40;            // 0: all
  float top_p = 0.95F;
  std::uint32_t seed = 0;
};

struct ModelInfo {
  std::string name;  // file name without folder, in valid UTF-8
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t trained_context = 0;
  bool has_chat_template = false;
};

struct Generation {
  std::vector<Token> tokens;
  std::string text;  // valid UTF-8
  bool context_full = false;
  double first_token_seconds = 0;  // from the start of prefill()
  double decode_seconds = 0;       // after the first token
};

// Totals of the plug-in since the last prefill() began.
struct PluginTotals {
  std::optional<std::string> isa;       // empty: nothing ran
  std::optional<double> kept_fraction;  // empty: nothing ran
  std::optional<double> mass_recall;
  double index_seconds = 0;
  double kernel_seconds = 0;
  double guard_seconds = 0;
  double attention_seconds = 0;  // everything: mask, index, kernels
  double linear_seconds = 0;     // matrix products
  std::map<std::string, std::int64_t> fallbacks;
  std::vector<std::string> declined;  // kinds of prompt attention that were left to llama.cpp
};

class Engine {
 public:
  // Checks the options, loads llama.cpp's backends, the plug-in (unless the method is stock) and
  // the model. Throws InvalidArgument, IoError, Unsupported for what the caller can mend,
  // RuntimeFailure otherwise. At most one engine at a time: llama.cpp's log is global.
  explicit Engine(EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ModelInfo& model() const { return info_; }
  int threads() const { return options_.threads; }
  double load_seconds() const { return load_seconds_; }
  // What the user should know and no exception says, one line each.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // The model's chat template over one exchange, ready for tokenize(). `system` may be empty.
  std::string apply_chat_template(const std::string& system, const std::string& user) const;

  // With the model's start token, and special tokens recognised.
  std::vector<Token> tokenize(const std::string& text) const;

  // Makes room for at least `size` tokens. Throws InvalidArgument naming both numbers when the
  // machine's memory does not hold them.
  void open_context(std::int64_t size);
  std::int64_t context_size() const;

  // Modality segments of the prompts of the following prefill() calls, which refuse those that do not
  // fit; none: text only. Throws InvalidArgument when the method takes none.
  void set_segments(std::vector<Segment> segments);

  // Throws InvalidArgument when the prompt is empty or longer than the context.
  void check_prompt(std::span<const Token> prompt) const;

  // Empties the context and computes a prompt into it. `progress` hears the tokens done. Throws
  // what check_prompt() throws, Interrupted, RuntimeFailure.
  void prefill(std::span<const Token> prompt,
               const std::function<void(std::int64_t done)>& progress = {});

  // The same, in the same steps. Returns for each of the last `scored` tokens the natural logarithm
  // of the probability that the model gave it after the tokens before it. Holds scored rows of a
  // step x vocabulary scores in memory. Throws InvalidArgument unless 0 <= scored < prompt.size().
  std::vector<double> prefill_scored(std::span<const Token> prompt, std::int64_t scored,
                                     const std::function<void(std::int64_t done)>& progress = {});

  // Continues the prompt. `on_text` hears whole characters as they come.
  Generation generate(const SamplingOptions& sampling, std::int64_t max_tokens,
                      const std::function<void(std::string_view)>& on_text = {});

  // Shows `observer` every call of causal attention of the following prefill() calls, until it is
  // replaced; empty: nobody. What it throws is said on stderr and fails the prefill. Throws
  // InvalidArgument with method stock.
  void observe(std::function<void(const AttentionCall&)> observer);

  // Empty with method stock.
  std::optional<PluginTotals> plugin_totals() const;

 private:
  void start_plugin();
  void load_model();
  // rows_after: tokens of the same prompt that later calls bring. `outputs` flags the rows that
  // scores of next tokens are wanted of; empty: the last row.
  void decode(std::span<const Token> tokens, std::int64_t rows_after,
              std::vector<std::int8_t> outputs = {});
  // Scores of the next token after a row of the last decode(), -1: its last; checked.
  const float* logits(std::int64_t row) const;
  double log_probability(std::int64_t row, Token next) const;
  std::string piece(Token token) const;
  bool stopped() const;

  EngineOptions options_;
  ModelInfo info_;
  std::vector<std::string> warnings_;
  double load_seconds_ = 0;
  std::int64_t used_ = 0;           // tokens in the context
  std::int64_t asked_context_ = 0;  // tokens; llama.cpp rounds them up
  std::chrono::steady_clock::time_point prefill_start_;
  std::function<void(const AttentionCall&)> observer_;
  std::vector<Segment> segments_;

  struct Llama;  // owned objects of llama.cpp
  std::unique_ptr<Llama> llama_;
};

}  // namespace minference::llama_host

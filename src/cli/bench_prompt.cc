#include "cli/bench_prompt.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

#include "cli/prompt_file.h"
#include "llama.h"
#include "llama/failure.h"
#include "llama/log_capture.h"
#include "llama/model_file.h"

namespace minference::cli {
namespace {

constexpr const char* kWords[] = {
    "river",   "stone",   "under",   "morning", "the",     "a",        "of",     "and",
    "window",  "carry",   "letter",  "seven",   "winter",  "market",   "yellow", "question",
    "before",  "quiet",   "engine",  "harbour", "to",      "in",       "that",   "because",
    "between", "people",  "number",  "walked",  "answer",  "silver",   "garden", "never",
    "always",  "station", "paper",   "distant", "with",    "from",     "light",  "machine",
    "water",   "written", "captain", "island",  "teacher", "small",    "heavy",  "record",
    "through", "he",      "she",     "they",    "learned", "bridge",   "copper", "is",
    "was",     "evening", "table",   "measure", "village", "northern", "music"};

// Words in sentences of a dozen, drawn by a generator whose numbers the standard fixes.
std::string word_sequence(std::size_t bytes) {
  std::mt19937 random(1);
  std::string text;
  text.reserve(bytes + 16);
  for (std::int64_t i = 1; text.size() < bytes; ++i) {
    text += kWords[random() % std::size(kWords)];
    text += i % 120 == 0 ? ".\n\n" : (i % 12 == 0 ? ". " : " ");
  }
  return text;
}

// `size`, or less, so that no character is cut.
std::size_t whole_characters(std::string_view text, std::size_t size) {
  if (size >= text.size()) return text.size();
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return size;
}

}  // namespace

struct BenchPrompts::Vocabulary {
  struct Deleter {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Deleter> model;
  const llama_vocab* tokens = nullptr;
  std::int64_t trained_context = 0;

  std::string metadata(const std::string& key) const {
    std::string value(256, '\0');
    const int length =
        llama_model_meta_val_str(model.get(), key.c_str(), value.data(), value.size());
    value.resize(static_cast<std::size_t>(std::clamp<int>(length, 0, 255)));
    return value;
  }
};

BenchPrompts::BenchPrompts(const std::string& model_path, const std::string& file)
    : vocabulary_(std::make_unique<Vocabulary>()), file_(file) {
  llama_host::check_model_file(model_path);
  if (!file.empty()) text_ = read_prompt_file(file);
  llama_host::capture_llama_log(false);
  llama_host::clear_llama_complaint();
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  vocabulary_->model.reset(llama_model_load_from_file(model_path.c_str(), params));
  if (!vocabulary_->model) {
    throw Unsupported(llama_host::explain(model_path + ": llama.cpp cannot load it"));
  }
  vocabulary_->tokens = llama_model_get_vocab(vocabulary_->model.get());
  // With the vocabulary alone llama.cpp does not read the sizes of the model.
  const std::string key = vocabulary_->metadata("general.architecture") + ".context_length";
  vocabulary_->trained_context = std::atoll(vocabulary_->metadata(key).c_str());
  if (vocabulary_->trained_context <= 0) {
    throw Unsupported(model_path + ": has no " + key + "; a language model is needed");
  }
}

BenchPrompts::~BenchPrompts() = default;

std::int64_t BenchPrompts::trained_context() const { return vocabulary_->trained_context; }

std::int64_t BenchPrompts::count(const std::string& text) const {
  if (text.size() > static_cast<std::size_t>(INT32_MAX)) {
    throw InvalidArgument("the prompt has " + std::to_string(text.size()) +
                          " bytes, more than 2147483647");
  }
  // Without room for the tokens the answer is minus their number.
  const std::int64_t tokens =
      llama_tokenize(vocabulary_->tokens, text.data(), static_cast<std::int32_t>(text.size()),
                     nullptr, 0, true, true);
  if (tokens == INT32_MIN) throw llama_host::RuntimeFailure("the prompt cannot be tokenised");
  return std::abs(tokens);
}

BenchPrompts::Prompt BenchPrompts::cut(std::int64_t tokens, std::int64_t at_most) {
  constexpr std::size_t kBytesPerToken = 4;  // a first guess
  constexpr int kMaxSteps = 64;
  const std::int64_t at_least = tokens - kSlack;
  std::size_t size = kBytesPerToken * static_cast<std::size_t>(tokens);
  std::size_t low = 0;   // has too few tokens
  std::size_t high = 0;  // has too many; 0: not known
  for (int step = 0; step < kMaxSteps; ++step) {
    if (file_.empty() && size > text_.size()) text_ = word_sequence(size);
    size = whole_characters(text_, size);
    Prompt prompt;
    prompt.text = text_.substr(0, size);
    prompt.tokens = count(prompt.text);
    if (prompt.tokens >= at_least && prompt.tokens <= at_most) return prompt;
    if (prompt.tokens < at_least) {
      if (!file_.empty() && size == text_.size()) {
        throw InvalidArgument(file_ + " has only " + std::to_string(prompt.tokens) + " tokens, " +
                              std::to_string(tokens) + " were asked for");
      }
      low = size;
    } else {
      high = size;
    }
    // Proportion first, bisection once that leaves the bounds.
    const double per_token =
        static_cast<double>(size) / static_cast<double>(std::max<std::int64_t>(1, prompt.tokens));
    size = static_cast<std::size_t>(per_token * static_cast<double>(at_least + at_most) / 2.0);
    if (size <= low || (high > 0 && size >= high)) size = high > 0 ? (low + high) / 2 : 2 * low;
  }
  throw llama_host::RuntimeFailure("no prompt of " + std::to_string(tokens) + " tokens was found");
}

}  // namespace minference::cli

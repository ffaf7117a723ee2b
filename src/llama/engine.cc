#include "llama/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include <sched.h>

#include "chat.h"
#include "llama.h"
#include "llama/log_capture.h"
#include "llama/model_file.h"
#include "llama/plugin_config.h"
#include "llama/text.h"

namespace minference::llama_host {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

nlohmann::json plugin_json(const EngineOptions& options) {
  const AttentionOptions& attention = options.attention;
  nlohmann::json json = {{"attn", attention.attn},
                         {"precision", attention.precision},
                         {"guard", attention.guard},
                         {"guard_rows", attention.guard_rows},
                         {"min_recall", attention.min_recall},
                         {"linear", attention.linear},
                         {"log", options.layer_table ? "1" : "0"}};
  if (!attention.options.empty()) json["options"] = attention.options;
  if (!attention.pattern.empty()) json["pattern"] = attention.pattern;
  return json;
}

std::string metadata(const llama_model* model, const std::string& key) {
  std::string value(256, '\0');
  const int length = llama_model_meta_val_str(model, key.c_str(), value.data(), value.size());
  if (length < 0) return {};
  value.resize(std::min(static_cast<std::size_t>(length), value.size() - 1));
  return value;
}

// Bytes of K and V of one token, over all layers; 0 where layers keep a window only.
std::int64_t kv_bytes_per_token(const llama_model* model) {
  if (llama_model_n_swa(model) > 0) return 0;
  const std::string arch = metadata(model, "general.architecture");
  const auto head_dim = [&](const char* key) -> std::int64_t {
    const std::string text = metadata(model, arch + key);
    if (!text.empty()) return std::atoll(text.c_str());
    return llama_model_n_embd(model) / std::max(1, llama_model_n_head(model));
  };
  constexpr std::int64_t kF16Bytes = 2;
  return kF16Bytes * llama_model_n_layer(model) * llama_model_n_head_kv(model) *
         (head_dim(".attention.key_length") + head_dim(".attention.value_length"));
}

// What the system could give without swapping; 0 when it does not say.
std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::int64_t kilobytes = 0;
  while (file >> key >> kilobytes) {
    if (key == "MemAvailable:") return kilobytes * 1024;
    file.ignore(64, '\n');
  }
  return 0;
}

int default_threads() {
  const int cores = common_cpu_get_num_math();
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return std::max(1, cores);
  return std::clamp(cores, 1, std::max(1, CPU_COUNT(&allowed)));
}

}  // namespace

struct Engine::Llama {
  struct ModelDeleter {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  struct ContextDeleter {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  struct SamplerDeleter {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
  };
  using Sampler = std::unique_ptr<llama_sampler, SamplerDeleter>;

  std::unique_ptr<llama_model, ModelDeleter> model;
  std::unique_ptr<llama_context, ContextDeleter> context;
  common_chat_templates_ptr templates;
  const llama_vocab* vocab = nullptr;
  std::optional<PluginFunctions> plugin;  // empty: stock

  static Sampler make_sampler(const SamplingOptions& options) {
    Sampler chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (options.temperature <= 0.0F) {
      llama_sampler_chain_add(chain.get(), llama_sampler_init_greedy());
      return chain;
    }
    llama_sampler_chain_add(chain.get(), llama_sampler_init_top_k(options.top_k));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_top_p(options.top_p, 1));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_temp(options.temperature));
    llama_sampler_chain_add(chain.get(), llama_sampler_init_dist(options.seed));
    return chain;
  }
};

Engine::Engine(EngineOptions options)
    : options_(std::move(options)), llama_(std::make_unique<Llama>()) {
  const auto start = Clock::now();
  if (options_.threads <= 0) options_.threads = default_threads();
  // The cheap checks first: a wrong option must not cost the time of loading a model.
  const PluginConfig config = config_from_json(plugin_json(options_).dump());
  check_model_file(options_.model_path);
  start_backends(options_.verbose);
  if (!config.stock()) start_plugin();
  load_model();
  if (config.patterns) config.patterns->check_model(info_.layers, info_.heads, info_.name);
  load_seconds_ = seconds_since(start);
}

Engine::~Engine() {
  if (observer_) llama_->plugin->set_observer(nullptr, nullptr);
}

void Engine::observe(std::function<void(const AttentionCall&)> observer) {
  if (!llama_->plugin) throw InvalidArgument("method stock has no calls to observe");
  observer_ = std::move(observer);
  if (!observer_) {
    llama_->plugin->set_observer(nullptr, nullptr);
    return;
  }
  llama_->plugin->set_observer(
      [](void* self, const AttentionCall& call) { static_cast<Engine*>(self)->observer_(call); },
      this);
}

void Engine::start_plugin() {
  llama_->plugin = load_plugin();
  if (const char* reason = llama_->plugin->configure(plugin_json(options_).dump().c_str())) {
    throw InvalidArgument(reason);
  }
}

void Engine::load_model() {
  llama_model_params params = llama_model_default_params();
  // Truthful until the first weight is read: the callback stops the loading.
  params.progress_callback = [](float, void* self) {
    return !static_cast<const Engine*>(self)->stopped();
  };
  params.progress_callback_user_data = this;
  clear_llama_complaint();
  llama_->model.reset(llama_model_load_from_file(options_.model_path.c_str(), params));
  if (stopped()) throw Interrupted("interrupted");
  if (!llama_->model)
    throw Unsupported(explain(options_.model_path + ": llama.cpp cannot load it"));
  const llama_model* model = llama_->model.get();
  if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
    throw Unsupported(options_.model_path + ": a model without a decoder-only language model (" +
                      metadata(model, "general.architecture") + ") cannot answer prompts");
  }
  llama_->vocab = llama_model_get_vocab(model);
  Utf8Stream name;
  info_.name = name.push(std::filesystem::path(options_.model_path).filename().string());
  info_.name += name.finish();
  info_.layers = llama_model_n_layer(model);
  info_.heads = llama_model_n_head(model);
  info_.trained_context = llama_model_n_ctx_train(model);
  info_.has_chat_template = llama_model_chat_template(model, nullptr) != nullptr;
  if (info_.has_chat_template) {
    try {
      llama_->templates = common_chat_templates_init(model, "");
    } catch (const std::exception& e) {
      throw Unsupported(options_.model_path + ": its chat template does not parse (" + e.what() +
                        "); --no-chat goes without");
    }
  }
}

std::string Engine::apply_chat_template(const std::string& system, const std::string& user) const {
  common_chat_templates_inputs inputs;
  const auto add = [&](const char* role, const std::string& content) {
    common_chat_msg message;
    message.role = role;
    message.content = content;
    inputs.messages.push_back(std::move(message));
  };
  if (!system.empty()) add("system", system);
  add("user", user);
  // tokenize() adds these tokens; llama-common then takes the template's own away.
  inputs.add_bos = llama_vocab_get_add_bos(llama_->vocab);
  inputs.add_eos = llama_vocab_get_add_eos(llama_->vocab);
  try {
    return common_chat_templates_apply(llama_->templates.get(), inputs).prompt;
  } catch (const std::exception& e) {
    throw Unsupported(info_.name + ": its chat template failed (" + e.what() +
                      "); --no-chat goes without");
  }
}

std::vector<Token> Engine::tokenize(const std::string& text) const {
  const auto call = [&](std::vector<Token>& tokens) {
    return llama_tokenize(llama_->vocab, text.data(), static_cast<std::int32_t>(text.size()),
                          tokens.data(), static_cast<std::int32_t>(tokens.size()), true, true);
  };
  if (text.size() > static_cast<std::size_t>(INT32_MAX)) {
    throw InvalidArgument("the prompt has " + std::to_string(text.size()) +
                          " bytes, more than 2147483647");
  }
  std::vector<Token> tokens(text.size() / 2 + 16);
  int count = call(tokens);
  if (count < 0 && count != INT32_MIN) {
    tokens.resize(static_cast<std::size_t>(-count));
    count = call(tokens);
  }
  if (count < 0) throw RuntimeFailure(explain("the prompt cannot be tokenised"));
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

void Engine::open_context(std::int64_t size) {
  const auto start = Clock::now();
  if (size > info_.trained_context) {
    warnings_.push_back("a context of " + std::to_string(size) + " tokens is more than the " +
                        std::to_string(info_.trained_context) + " that " + info_.name +
                        " was trained for");
  }
  const std::int64_t needed = size * kv_bytes_per_token(llama_->model.get());
  const std::int64_t available = available_bytes();
  if (available > 0 && needed > available) {
    throw InvalidArgument("a context of " + std::to_string(size) + " tokens needs " +
                          std::to_string(needed >> 20) + " MiB for its KV cache, " +
                          std::to_string(available >> 20) + " MiB are available");
  }
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(size);
  params.n_batch = static_cast<std::uint32_t>(options_.ubatch);
  params.n_ubatch = params.n_batch;
  params.n_threads = options_.threads;
  params.n_threads_batch = options_.threads;
  // Without it there is no flash attention operation to take.
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.abort_callback = [](void* self) { return static_cast<const Engine*>(self)->stopped(); };
  params.abort_callback_data = this;
  clear_llama_complaint();
  llama_->context.reset(llama_init_from_model(llama_->model.get(), params));
  if (!llama_->context) {
    throw RuntimeFailure(
        explain("llama.cpp cannot make a context of " + std::to_string(size) + " tokens"));
  }
  used_ = 0;
  asked_context_ = size;
  load_seconds_ += seconds_since(start);
}

std::int64_t Engine::context_size() const { return llama_n_ctx(llama_->context.get()); }

bool Engine::stopped() const {
  return options_.stop != nullptr && options_.stop->load(std::memory_order_relaxed);
}

void Engine::set_segments(std::vector<Segment> segments) {
  const std::string& attn = options_.attention.attn;
  if (!segments.empty() && (attn == kStock || !find_method(attn).takes_segments())) {
    throw InvalidArgument("segments are for the method " + segment_method_names() + ", not for " +
                          attn);
  }
  segments_ = std::move(segments);
}

void Engine::decode(std::span<const Token> tokens, std::int64_t rows_after,
                    std::vector<std::int8_t> outputs) {
  const auto set_segments = [&](std::span<const Segment> segments) {
    if (!llama_->plugin) return;
    llama_->plugin->set_segments(segments.data(), static_cast<std::int64_t>(segments.size()));
  };
  if (llama_->plugin) llama_->plugin->set_rows_after(rows_after);
  set_segments(segments_);
  // llama.cpp does not write to the tokens, its batch type only cannot say so.
  llama_batch batch = llama_batch_get_one(const_cast<Token*>(tokens.data()),
                                          static_cast<std::int32_t>(tokens.size()));
  if (!outputs.empty()) batch.logits = outputs.data();
  clear_llama_complaint();
  const int status = llama_decode(llama_->context.get(), batch);
  set_segments({});  // the plug-in outlives this engine
  if (status == 2 || stopped()) throw Interrupted("interrupted");
  if (status != 0) {
    throw RuntimeFailure(explain("llama.cpp failed at token " + std::to_string(used_) +
                                 " (status " + std::to_string(status) + ")"));
  }
  used_ += static_cast<std::int64_t>(tokens.size());
}

const float* Engine::logits(std::int64_t row) const {
  const float* logits = llama_get_logits_ith(llama_->context.get(), static_cast<std::int32_t>(row));
  if (logits == nullptr) {
    throw Unsupported(info_.name + " scores no next tokens: an embedding model cannot answer");
  }
  const int count = llama_vocab_n_tokens(llama_->vocab);
  bool finite = false;
  for (int i = 0; i < count; ++i) {
    if (std::isnan(logits[i])) {
      throw RuntimeFailure(
          "the model's output is not a number (NaN) after token " + std::to_string(used_) +
          ": the model file is damaged, or attention overflowed; try --attn stock");
    }
    finite = finite || std::isfinite(logits[i]);
  }
  if (!finite) throw RuntimeFailure("the model's output is infinite for every token");
  return logits;
}

double Engine::log_probability(std::int64_t row, Token next) const {
  const std::span<const float> scores(
      logits(row), static_cast<std::size_t>(llama_vocab_n_tokens(llama_->vocab)));
  const float largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const float score : scores) sum += std::exp(score - largest);
  return scores[static_cast<std::size_t>(next)] - largest - std::log(sum);
}

void Engine::check_prompt(std::span<const Token> prompt) const {
  const auto total = static_cast<std::int64_t>(prompt.size());
  if (total == 0) throw InvalidArgument("the prompt is empty");
  if (total > context_size()) {
    std::string holds = std::to_string(context_size());
    if (context_size() != asked_context_) {
      holds += " (" + std::to_string(asked_context_) + ", rounded up by llama.cpp)";
    }
    throw InvalidArgument("the prompt has " + std::to_string(total) +
                          " tokens, the context holds " + holds);
  }
  validate(segments_, total);
}

void Engine::prefill(std::span<const Token> prompt,
                     const std::function<void(std::int64_t)>& progress) {
  prefill_scored(prompt, 0, progress);
}

std::vector<double> Engine::prefill_scored(std::span<const Token> prompt, std::int64_t scored,
                                           const std::function<void(std::int64_t)>& progress) {
  check_prompt(prompt);
  const auto total = static_cast<std::int64_t>(prompt.size());
  if (scored < 0 || scored >= total) {
    throw InvalidArgument(std::to_string(scored) + " scored tokens of a prompt of " +
                          std::to_string(total) + ", legal: 0 to " + std::to_string(total - 1));
  }
  if (used_ > 0) llama_memory_clear(llama_get_memory(llama_->context.get()), true);
  used_ = 0;
  if (llama_->plugin) llama_->plugin->reset_stats();
  prefill_start_ = Clock::now();
  std::vector<double> result;
  for (std::int64_t done = 0; done < total;) {
    const std::int64_t count = std::min<std::int64_t>(options_.ubatch, total - done);
    // Each token is scored by the row before it.
    const std::int64_t first = std::max(total - scored - 1, done);
    const std::int64_t last = std::min(total - 1, done + count);
    std::vector<std::int8_t> outputs;
    if (first < last) {
      outputs.resize(static_cast<std::size_t>(count));
      std::fill(outputs.begin() + (first - done), outputs.begin() + (last - done), 1);
      outputs.back() = 1;  // the row that generate() continues from
    }
    decode(prompt.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)),
           total - done - count, std::move(outputs));
    for (std::int64_t row = first; row < last; ++row) {
      result.push_back(log_probability(row - done, prompt[static_cast<std::size_t>(row + 1)]));
    }
    done += count;
    if (progress) progress(done);
  }
  logits(-1);
  return result;
}

std::string Engine::piece(Token token) const {
  std::string text(64, '\0');
  const auto call = [&] {
    return llama_token_to_piece(llama_->vocab, token, text.data(),
                                static_cast<std::int32_t>(text.size()), 0, false);
  };
  int length = call();
  if (length < 0) {
    text.resize(static_cast<std::size_t>(-length));
    length = call();
  }
  text.resize(static_cast<std::size_t>(std::max(0, length)));
  return text;
}

Generation Engine::generate(const SamplingOptions& sampling, std::int64_t max_tokens,
                            const std::function<void(std::string_view)>& on_text) {
  Generation result;
  Utf8Stream stream;
  const auto emit = [&](const std::string& text) {
    result.text += text;
    if (on_text && !text.empty()) on_text(text);
  };
  const Llama::Sampler sampler = Llama::make_sampler(sampling);
  Clock::time_point first_token;
  while (static_cast<std::int64_t>(result.tokens.size()) < max_tokens) {
    const Token token = llama_sampler_sample(sampler.get(), llama_->context.get(), -1);
    if (result.first_token_seconds == 0) {
      first_token = Clock::now();
      result.first_token_seconds = seconds_since(prefill_start_);
    }
    if (llama_vocab_is_eog(llama_->vocab, token)) break;
    result.tokens.push_back(token);
    emit(stream.push(piece(token)));
    if (static_cast<std::int64_t>(result.tokens.size()) == max_tokens) break;
    if (used_ == context_size()) {
      result.context_full = true;
      break;
    }
    decode(std::span(&token, 1), 0);
    logits(-1);
  }
  if (result.first_token_seconds > 0) result.decode_seconds = seconds_since(first_token);
  emit(stream.finish());
  return result;
}

std::optional<PluginTotals> Engine::plugin_totals() const {
  if (!llama_->plugin) return std::nullopt;
  const nlohmann::json json = nlohmann::json::parse(llama_->plugin->stats());
  PluginTotals totals;
  if (!json.at("isa").is_null()) totals.isa = json.at("isa").get<std::string>();
  const double causal = json.at("causal_pairs").get<double>();
  if (causal > 0) totals.kept_fraction = json.at("kept_pairs").get<double>() / causal;
  totals.guard_seconds = json.at("guard_seconds").get<double>();
  if (!json.at("mass_recall").is_null()) totals.mass_recall = json.at("mass_recall").get<double>();
  totals.index_seconds = json.at("index_seconds").get<double>();
  totals.kernel_seconds = json.at("kernel_seconds").get<double>();
  totals.attention_seconds = json.at("total_seconds").get<double>();
  totals.linear_seconds = json.at("linear_seconds").get<double>();
  totals.fallbacks = json.at("fallbacks").get<std::map<std::string, std::int64_t>>();
  totals.declined = json.at("declined").get<std::vector<std::string>>();
  return totals;
}

}  // namespace minference::llama_host

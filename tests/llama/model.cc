#include "llama/model.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "llama/host.h"

namespace minference::testing {
namespace {

std::string existing(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error(path + " is missing: `make models` fetches it");
  }
  return path;
}

// The model with every tensor expanded to f32, by way of a file that is gone afterwards.
llama_model* expand_to_f32(const std::string& path) {
  const std::string expanded =
      (std::filesystem::temp_directory_path() / ("minference-f32-" + std::to_string(getpid())))
          .string();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  llama_model* model = nullptr;
  if (llama_model_quantize(path.c_str(), expanded.c_str(), &params) == 0) {
    model = llama_model_load_from_file(expanded.c_str(), llama_model_default_params());
  }
  std::filesystem::remove(expanded);
  return model;
}

}  // namespace

std::string model_path() {
  return existing(MINFERENCE_TEST_MODELS_DIR "/smollm2-135m-instruct-q4_1.gguf");
}

std::string text_path(const std::string& name) {
  return existing(MINFERENCE_TEST_MODELS_DIR "/text/" + name);
}

TestModel& TestModel::get() {
  static TestModel model;
  return model;
}

TestModel::TestModel() {
  Host::get();
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  file_.reset(llama_model_load_from_file(model_path().c_str(), llama_model_default_params()));
  if (!file_) throw std::runtime_error(model_path() + " does not load");
  std::ifstream file(text_path("hamlet_gut.txt"), std::ios::binary);
  std::stringstream stream;
  stream << file.rdbuf();
  const std::string text = stream.str().substr(0, 40000);
  tokens_.resize(text.size());
  const int count = llama_tokenize(vocab(), text.data(), static_cast<int>(text.size()),
                                   tokens_.data(), static_cast<int>(tokens_.size()), true, true);
  tokens_.resize(static_cast<std::size_t>(std::max(0, count)));
}

llama_model* TestModel::model(Weights weights) {
  if (weights == Weights::kFile) return file_.get();
  if (!f32_) f32_.reset(expand_to_f32(model_path()));
  if (!f32_) throw std::runtime_error(model_path() + " does not load with f32 weights");
  return f32_.get();
}

std::vector<llama_token> TestModel::text(std::size_t count, std::size_t offset) const {
  if (offset + count > tokens_.size()) throw std::runtime_error("the text is too short");
  const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(offset);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

TestContext::TestContext(const ContextOptions& options) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx =
      static_cast<std::uint32_t>(options.size * (options.unified ? 1 : options.sequences));
  params.n_batch = params.n_ctx;
  params.n_ubatch = static_cast<std::uint32_t>(options.ubatch);
  params.n_seq_max = static_cast<std::uint32_t>(options.sequences);
  params.kv_unified = options.unified;
  params.n_threads = options.threads;
  params.n_threads_batch = options.threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = options.kv_type;
  params.type_v = options.kv_type;
  context_.reset(llama_init_from_model(TestModel::get().model(options.weights), params));
  if (!context_) throw std::runtime_error("no context");
}

int TestContext::try_decode(const std::vector<Entry>& entries) {
  llama_batch batch = llama_batch_init(static_cast<int>(entries.size()), 0, 1);
  for (const Entry& entry : entries) {
    const int i = batch.n_tokens++;
    batch.token[i] = entry.token;
    batch.pos[i] = entry.pos;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = entry.sequence;
    batch.logits[i] = entry.output ? 1 : 0;
  }
  const int status = llama_decode(context_.get(), batch);
  llama_batch_free(batch);
  return status;
}

std::vector<Logits> TestContext::decode(const std::vector<Entry>& entries) {
  const int status = try_decode(entries);
  if (status != 0) throw std::runtime_error("llama_decode: " + std::to_string(status));
  std::vector<Logits> all;
  const int vocabulary = llama_vocab_n_tokens(TestModel::get().vocab());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].output) continue;
    const float* logits = llama_get_logits_ith(context_.get(), static_cast<int>(i));
    all.emplace_back(logits, logits + vocabulary);
  }
  return all;
}

Logits TestContext::append(const std::vector<llama_token>& tokens, llama_pos pos,
                           llama_seq_id sequence) {
  return decode(entries_of(tokens, pos, sequence)).at(0);
}

std::vector<llama_token> TestContext::greedy(Logits logits, llama_pos pos, int count,
                                             double* margin) {
  std::vector<llama_token> tokens;
  *margin = INFINITY;
  for (int i = 0; i < count; ++i) {
    const auto best = std::max_element(logits.begin(), logits.end());
    const float value = *best;
    tokens.push_back(static_cast<llama_token>(best - logits.begin()));
    *best = -INFINITY;
    *margin = std::min<double>(*margin, value - *std::max_element(logits.begin(), logits.end()));
    if (i + 1 < count) logits = append({tokens.back()}, pos + i);
  }
  return tokens;
}

std::vector<Entry> entries_of(const std::vector<llama_token>& tokens, llama_pos pos,
                              llama_seq_id sequence) {
  std::vector<Entry> entries;
  for (const llama_token token : tokens) entries.push_back({token, pos++, sequence, false});
  entries.back().output = true;
  return entries;
}

double largest_difference(const Logits& a, const Logits& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    // NaN must not pass for equal.
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

}  // namespace minference::testing

// The small real model, text for it, and contexts that are filled token by token of our choosing.
//
// The model comes in two forms. As it is, its products quantise activations to 8 bits, where the
// least difference in attention flips roundings and moves a logit by half a unit: good for "the
// same greedy tokens" only. With its weights expanded to f32 nothing amplifies, and a logit tells a
// key that is wrongly seen from rounding.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "llama.h"

namespace minference::testing {

// Path of the model or of a text under models/. Throws, naming the command that fetches it, when it
// is not there.
std::string model_path();
std::string text_path(const std::string& name);

enum class Weights { kFile, kF32 };

class TestModel {
 public:
  static TestModel& get();

  llama_model* model(Weights weights);
  const llama_vocab* vocab() const { return llama_model_get_vocab(file_.get()); }
  // `count` tokens of the text, from token `offset` on.
  std::vector<llama_token> text(std::size_t count, std::size_t offset = 0) const;

 private:
  TestModel();

  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Free> file_;
  std::unique_ptr<llama_model, Free> f32_;
  std::vector<llama_token> tokens_;
};

struct ContextOptions {
  Weights weights = Weights::kF32;
  int size = 2048;
  int ubatch = 512;
  int sequences = 1;
  bool unified = false;
  int threads = 2;
  ggml_type kv_type = GGML_TYPE_F16;
};

// One token of a batch.
struct Entry {
  llama_token token;
  llama_pos pos;
  llama_seq_id sequence = 0;
  bool output = false;
};

using Logits = std::vector<float>;

class TestContext {
 public:
  explicit TestContext(const ContextOptions& options);

  llama_context* context() const { return context_.get(); }
  llama_memory_t memory() const { return llama_get_memory(context_.get()); }

  // The status of llama_decode().
  int try_decode(const std::vector<Entry>& entries);
  // Logits of the entries with `output`, in order. Throws when llama_decode() fails.
  std::vector<Logits> decode(const std::vector<Entry>& entries);
  // `tokens` of one sequence from position `pos` on; the logits of the last one.
  Logits append(const std::vector<llama_token>& tokens, llama_pos pos, llama_seq_id sequence = 0);
  // The `count` greedy tokens that follow the logits of the token at `pos` - 1, and the smallest
  // distance between a best and a second best logit among them.
  std::vector<llama_token> greedy(Logits logits, llama_pos pos, int count, double* margin);

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  std::unique_ptr<llama_context, Free> context_;
};

std::vector<Entry> entries_of(const std::vector<llama_token>& tokens, llama_pos pos,
                              llama_seq_id sequence);
double largest_difference(const Logits& a, const Logits& b);

}  // namespace minference::testing

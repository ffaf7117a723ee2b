// Prompts of a wanted number of tokens, from a text or from built-in words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace minference::cli {

class BenchPrompts {
 public:
  // A prompt may have this many tokens fewer than asked for: text cannot be cut everywhere.
  static constexpr std::int64_t kSlack = 16;

  struct Prompt {
    std::string text;
    std::int64_t tokens = 0;
  };

  // Reads the vocabulary of a model, not its weights, and the text. Without `file` (empty) the text
  // is a repeatable sequence of words, as long as needed. Throws IoError, InvalidArgument and
  // Unsupported.
  BenchPrompts(const std::string& model_path, const std::string& file);
  ~BenchPrompts();
  BenchPrompts(const BenchPrompts&) = delete;
  BenchPrompts& operator=(const BenchPrompts&) = delete;

  std::int64_t trained_context() const;

  // The beginning of the text with at most `at_most` tokens and at least `tokens` - kSlack. Throws
  // InvalidArgument, naming both lengths, when the file is too short.
  Prompt cut(std::int64_t tokens, std::int64_t at_most);

 private:
  std::int64_t count(const std::string& text) const;

  struct Vocabulary;
  std::unique_ptr<Vocabulary> vocabulary_;
  std::string file_;
  std::string text_;
};

}  // namespace minference::cli

// Pattern files: one (pattern, budget) pair per attention head, in the reference system's JSON.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace minference {

// Pattern of one head.
struct HeadPattern {
  enum class Kind : std::uint8_t { kVerticalSlash, kAShape, kBlockSparse };
  Kind kind = Kind::kVerticalSlash;
  std::int64_t vertical = 1000;  // columns; A-shape: initial tokens
  std::int64_t slash = 6096;     // offsets; A-shape: local tokens
  double score = 0.0;            // what the search recorded; informational
};

// "vertical_and_slash", "stream_llm" or "block_sparse".
const char* pattern_kind_name(HeadPattern::Kind kind);

// A parsed file: a JSON array with one object per layer, each mapping the head number (a string) to
// [type, vertical, slash, score]; types are "vertical_and_slash", "stream_llm" and "block_sparse".
// Heads that the file leaves out have the default pattern.
class PatternFile {
 public:
  // Throws IoError when the file cannot be read and InvalidArgument, naming layer, head and value,
  // when its content is not such an array.
  static PatternFile load(const std::string& path);
  static PatternFile parse(const std::string& text, const std::string& name_in_errors);

  PatternFile() = default;
  // A file without any head yet.
  explicit PatternFile(std::int64_t layers) : heads_(layers) {}

  // Throws InvalidArgument for a layer, head or budget that a file cannot have.
  void set(std::int64_t layer, std::int64_t head, const HeadPattern& pattern);

  // The reference system's layout: what it wrote comes back as it was, byte for byte.
  std::string to_json() const;
  // Writes to_json() so that `path` holds the whole file or what it held before. Throws IoError.
  void save(const std::string& path) const;

  std::int64_t layers() const { return static_cast<std::int64_t>(heads_.size()); }
  // One more than the largest head number in the file.
  std::int64_t heads() const { return max_head_ + 1; }
  const std::string& name() const { return name_; }

  // The pattern of a head, the default one where the file has none.
  HeadPattern at(std::int64_t layer, std::int64_t head) const;

  // Throws InvalidArgument, naming both sides, unless the file is for a model of this shape.
  void check_model(std::int64_t layers, std::int64_t q_heads, const std::string& model) const;

 private:
  std::vector<std::map<std::int64_t, HeadPattern>> heads_;  // [layer] head -> pattern
  std::int64_t max_head_ = -1;
  std::string name_;
};

}  // namespace minference

#include "minference/pattern.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/replace_file.h"
#include "minference/error.h"

namespace minference {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
constexpr std::int64_t kMaxHead = 1 << 20;
// Array of layers (depth 0), object of heads (1), array of four (2): nothing nests deeper.
constexpr int kObjectDepth = 1;
constexpr int kArrayDepth = 2;

constexpr std::pair<const char*, HeadPattern::Kind> kTypes[] = {
    {"vertical_and_slash", HeadPattern::Kind::kVerticalSlash},
    {"stream_llm", HeadPattern::Kind::kAShape},
    {"block_sparse", HeadPattern::Kind::kBlockSparse},
};

// A value as it stands in a message: on one line and never longer than the line.
std::string shown(const json& value) {
  constexpr std::size_t kLength = 60;
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kLength) text = text.substr(0, kLength) + "...";
  return text;
}

// The number that `key` is the plain decimal form of; -1 for anything else ("01", "+1", "1.0").
std::int64_t head_number(const std::string& key) {
  const bool digits =
      !key.empty() && key.size() <= 7 && key.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || (key.size() > 1 && key[0] == '0')) return -1;
  return std::stoll(key);
}

// Parses text, refusing what the format never has: deep nesting, and a head given twice.
json parse_json(const std::string& text, const std::string& name) {
  std::set<std::string> keys;
  std::int64_t layer = -1;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    const bool object = event == json::parse_event_t::object_start;
    const bool array = event == json::parse_event_t::array_start;
    if ((object && depth > kObjectDepth) || (array && depth > kArrayDepth)) {
      throw InvalidArgument(name + ": nested deeper than an array of objects of arrays");
    }
    if (object) {
      keys.clear();
      ++layer;
    }
    if (event == json::parse_event_t::key && !keys.insert(parsed.get<std::string>()).second) {
      throw InvalidArgument(name + ": layer " + std::to_string(layer) + " has head " +
                            shown(parsed) + " twice");
    }
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    // Without the parser's "[json.exception...] " tag, and safe to print: it quotes the input.
    const std::string what = error.what();
    const std::size_t tag = what.find("] ");
    std::string reason = what.substr(tag == std::string::npos ? 0 : tag + 2, 200);
    std::replace_if(
        reason.begin(), reason.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    throw InvalidArgument(name + " is not valid JSON: " + reason);
  }
}

std::int64_t parse_size(const json& value, const char* what, const std::string& where) {
  // The unsigned test keeps values above 2^63 from turning negative.
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxSize));
  const std::int64_t size = fits ? value.get<std::int64_t>() : -1;
  if (size < 0 || size > kMaxSize) {
    throw InvalidArgument(where + what + " is " + shown(value) +
                          "; legal: a whole number from 0 to " + std::to_string(kMaxSize));
  }
  return size;
}

HeadPattern::Kind parse_kind(const json& value, const std::string& where) {
  std::string legal;
  for (const auto& [type_name, kind] : kTypes) {
    if (value.is_string() && value.get_ref<const std::string&>() == type_name) return kind;
    legal += (legal.empty() ? "" : ", ") + std::string(type_name);
  }
  throw InvalidArgument(where + "the type is " + shown(value) + "; legal: " + legal);
}

HeadPattern parse_head(const json& value, const std::string& where) {
  if (!value.is_array() || value.size() != 4) {
    throw InvalidArgument(where + "the value is " + shown(value) +
                          "; legal: [type, vertical, slash, score]");
  }
  HeadPattern head;
  head.kind = parse_kind(value[0], where);
  head.vertical = parse_size(value[1], "vertical", where);
  head.slash = parse_size(value[2], "slash", where);
  if (!value[3].is_number()) {
    throw InvalidArgument(where + "the score is " + shown(value[3]) + "; legal: a number");
  }
  head.score = value[3].get<double>();
  return head;
}

// Scores are shares, or counts of elements, which the reference writes as whole numbers.
json score_json(double score) {
  const bool count = score > 1 && score == std::floor(score) && score < 0x1p53;
  return count ? json(static_cast<std::int64_t>(score)) : json(score);
}

}  // namespace

const char* pattern_kind_name(HeadPattern::Kind kind) {
  return std::find_if(std::begin(kTypes), std::end(kTypes),
                      [kind](const auto& type) { return type.second == kind; })
      ->first;
}

PatternFile PatternFile::load(const std::string& path) {
  // Opening a folder succeeds and reading from it fails without a reason, so it is told apart here.
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw IoError("cannot read pattern file " + path + ": it is a directory");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  // An empty file sets the fail bit of `content` only, and is left to the parser.
  if (!file || file.bad()) {
    const char* reason = errno != 0 ? std::strerror(errno) : "unknown reason";
    throw IoError("cannot read pattern file " + path + ": " + reason);
  }
  return parse(content.str(), path);
}

PatternFile PatternFile::parse(const std::string& text, const std::string& name_in_errors) {
  const std::string name = "pattern file " + name_in_errors;
  const json root = parse_json(text, name);
  if (!root.is_array() || root.empty()) {
    throw InvalidArgument(name + ": the content is " + shown(root) +
                          "; legal: an array with one object per layer, at least one");
  }
  PatternFile file;
  file.name_ = name_in_errors;
  file.heads_.resize(root.size());
  for (std::size_t layer = 0; layer < root.size(); ++layer) {
    const std::string in_layer = name + ": layer " + std::to_string(layer);
    if (!root[layer].is_object()) {
      throw InvalidArgument(in_layer + " is " + shown(root[layer]) +
                            "; legal: an object of head number to pattern");
    }
    for (const auto& [key, value] : root[layer].items()) {
      const std::int64_t head = head_number(key);
      if (head < 0 || head > kMaxHead) {
        throw InvalidArgument(in_layer + " has head " + shown(key) +
                              "; legal: a number from 0 to " + std::to_string(kMaxHead));
      }
      std::string where = in_layer;
      where.append(", head ").append(key).append(": ");
      file.heads_[layer][head] = parse_head(value, where);
      file.max_head_ = std::max(file.max_head_, head);
    }
  }
  return file;
}

void PatternFile::set(std::int64_t layer, std::int64_t head, const HeadPattern& pattern) {
  const auto check = [](const char* what, std::int64_t value, std::int64_t max) {
    if (value >= 0 && value <= max) return;
    throw InvalidArgument(std::string(what) + " is " + std::to_string(value) + "; legal: 0 to " +
                          std::to_string(max));
  };
  check("layer", layer, layers() - 1);
  check("head", head, kMaxHead);
  check("vertical", pattern.vertical, kMaxSize);
  check("slash", pattern.slash, kMaxSize);
  if (!std::isfinite(pattern.score)) throw InvalidArgument("the score is not a finite number");
  heads_[layer][head] = pattern;
  max_head_ = std::max(max_head_, head);
}

std::string PatternFile::to_json() const {
  std::string text = "[";
  for (const auto& layer : heads_) {
    text += text.size() > 1 ? ", {" : "{";
    bool first = true;
    for (const auto& [head, pattern] : layer) {
      text += (first ? "\"" : ", \"") + std::to_string(head) + "\": [\"" +
              pattern_kind_name(pattern.kind) + "\", " + std::to_string(pattern.vertical) + ", " +
              std::to_string(pattern.slash) + ", " + score_json(pattern.score).dump() + "]";
      first = false;
    }
    text += "}";
  }
  return text + "]";
}

void PatternFile::save(const std::string& path) const { replace_file(path, to_json()); }

HeadPattern PatternFile::at(std::int64_t layer, std::int64_t head) const {
  if (layer < 0 || layer >= layers()) return {};
  const auto found = heads_[layer].find(head);
  return found == heads_[layer].end() ? HeadPattern{} : found->second;
}

void PatternFile::check_model(std::int64_t layers, std::int64_t q_heads,
                              const std::string& model) const {
  // A file that names no head at all leaves every one at the default, which fits any model.
  if (layers == this->layers() && (q_heads == heads() || heads() == 0)) return;
  throw InvalidArgument("pattern file " + name_ + " is for " + std::to_string(this->layers()) +
                        " layers of " + std::to_string(heads()) + " heads; model " + model +
                        " has " + std::to_string(layers) + " layers of " + std::to_string(q_heads));
}

}  // namespace minference

#include "llama/text.h"

#include <cstdint>

namespace minference::llama_host {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

enum class Scan : std::uint8_t { kValid, kInvalid, kIncomplete };

struct Character {
  Scan scan;
  std::size_t length;  // bytes of it; of an invalid one, those to skip
};

// The character at the start of `text`, which is not empty. Table 3-7 of the Unicode standard.
Character scan_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Scan::kValid, 1};
  std::size_t length = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
  } else {
    return {Scan::kInvalid, 1};
  }
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Scan::kIncomplete, i};
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (i == 1) {
      if (lead == 0xE0) low = 0xA0;   // overlong
      if (lead == 0xED) high = 0x9F;  // surrogates
      if (lead == 0xF0) low = 0x90;   // overlong
      if (lead == 0xF4) high = 0x8F;  // beyond U+10FFFF
    }
    if (byte(i) < low || byte(i) > high) return {Scan::kInvalid, i};
  }
  return {Scan::kValid, length};
}

}  // namespace

std::optional<std::size_t> find_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const Character character = scan_character(text.substr(i));
    if (character.scan != Scan::kValid) return i;
    i += character.length;
  }
  return std::nullopt;
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string complete;
  std::size_t i = 0;
  while (i < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(i);
    const Character character = scan_character(rest);
    if (character.scan == Scan::kIncomplete) break;
    complete += character.scan == Scan::kValid ? rest.substr(0, character.length)
                                               : std::string_view(kReplacement);
    i += character.length;
  }
  pending_.erase(0, i);
  return complete;
}

std::string Utf8Stream::finish() {
  const bool cut = !pending_.empty();
  pending_.clear();
  return cut ? kReplacement : "";
}

}  // namespace minference::llama_host

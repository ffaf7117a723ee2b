// UTF-8: checking what users give, and cutting a stream of bytes only between characters.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace minference::llama_host {

// Offset of the first byte that is not part of valid UTF-8, or nothing.
std::optional<std::size_t> find_invalid_utf8(std::string_view text);

// Collects bytes, hands out whole characters.
class Utf8Stream {
 public:
  // Adds bytes and returns what is complete now. Invalid bytes come out as U+FFFD.
  std::string push(std::string_view bytes);
  // The rest: U+FFFD when the last character was never completed.
  std::string finish();

 private:
  std::string pending_;
};

}  // namespace minference::llama_host

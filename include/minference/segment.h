// Segments: which tokens of a prompt are text and which are visual, for methods that tell them apart.
#pragma once

#include <cstdint>
#include <span>

namespace minference {

enum class Modality : std::uint8_t { kText, kVisual };

// Tokens [begin, end) of a prompt, absolute positions. What no segment covers is text.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  Modality modality = Modality::kText;
  // Tokens of a frame of a visual segment, the period of its patterns; 0: not known.
  std::int64_t stride = 0;
};

// Rows of a chunk, or tokens of a prompt, [begin, end).
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Equally spaced tokens of a visual segment: begin, begin + stride, ... below end.
struct GridLines {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t stride = 1;

  bool contains(std::int64_t token) const {
    return token >= begin && token < end && (token - begin) % stride == 0;
  }
};

// Throws InvalidArgument, naming the segment, its value and what is legal, unless the segments of a
// prompt of `prompt_tokens` tokens ascend without overlap, none is empty, none leaves the prompt, and
// strides are 0 or, of visual segments, at most their length.
void validate(std::span<const Segment> segments, std::int64_t prompt_tokens);

}  // namespace minference

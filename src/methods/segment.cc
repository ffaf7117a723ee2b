#include "minference/segment.h"

#include <string>

#include "minference/error.h"

namespace minference {

void validate(std::span<const Segment> segments, std::int64_t prompt_tokens) {
  std::int64_t previous_end = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const std::string name = "segment " + std::to_string(i) + " is [" +
                             std::to_string(segment.begin) + ", " + std::to_string(segment.end) +
                             ")";
    if (segment.begin < 0 || segment.end <= segment.begin || segment.end > prompt_tokens) {
      throw InvalidArgument(name + "; legal: 0 <= begin < end <= " + std::to_string(prompt_tokens) +
                            ", the tokens of the prompt");
    }
    if (segment.begin < previous_end) {
      throw InvalidArgument(name + " and begins before " + std::to_string(previous_end) +
                            ", the end of the one before; legal: ascending, without overlap");
    }
    previous_end = segment.end;
    const bool visual = segment.modality == Modality::kVisual;
    if (!visual && segment.modality != Modality::kText) {
      throw InvalidArgument(name + " of modality " +
                            std::to_string(static_cast<int>(segment.modality)) +
                            "; legal: text (0), visual (1)");
    }
    const std::int64_t longest = visual ? segment.end - segment.begin : 0;
    if (segment.stride < 0 || segment.stride > longest) {
      throw InvalidArgument(
          name + " with a stride of " + std::to_string(segment.stride) + "; legal: 0 (not known)" +
          (visual ? " to its length, " + std::to_string(longest) : ", because it is text"));
    }
  }
}

}  // namespace minference

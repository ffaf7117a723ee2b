#include "methods/modalities.h"

#include <algorithm>

namespace minference {

Modalities::Modalities(std::span<const Segment> segments, std::int64_t kv_len) {
  for (Segment segment : segments) {
    if (segment.modality != Modality::kVisual || segment.begin >= kv_len) continue;
    segment.end = std::min(segment.end, kv_len);
    visual_.push_back(segment);
    if (!runs_.empty() && runs_.back().end == segment.begin) {
      runs_.back().end = segment.end;
    } else {
      runs_.push_back({segment.begin, segment.end});
    }
  }
}

bool Modalities::is_visual(std::int64_t position) const {
  const auto run = std::partition_point(runs_.begin(), runs_.end(),
                                        [=](const TokenRange& r) { return r.end <= position; });
  return run != runs_.end() && run->begin <= position;
}

std::uint8_t Modalities::among_rows(const SequenceGeometry& geometry) const {
  const std::int64_t begin = std::max<std::int64_t>(geometry.position(0), 0);
  std::int64_t visual = 0;
  for (const TokenRange& run : runs_) {
    visual += std::max<std::int64_t>(run.end - std::max(run.begin, begin), 0);
  }
  const bool text = visual < geometry.kv_len - begin;
  return static_cast<std::uint8_t>((text ? 1 : 0) | (visual > 0 ? 2 : 0));
}

TokenRange Modalities::last_rows(const SequenceGeometry& geometry, Modality modality,
                                 std::int64_t count) const {
  const bool visual = modality == Modality::kVisual;
  const auto belongs = [&](std::int64_t row) {
    return geometry.position(row) >= 0 && is_visual(geometry.position(row)) == visual;
  };
  std::int64_t end = geometry.q_len;
  while (end > 0 && !belongs(end - 1)) --end;
  std::int64_t begin = end;
  while (begin > 0 && end - begin < count && belongs(begin - 1)) --begin;
  return {begin, end};
}

}  // namespace minference

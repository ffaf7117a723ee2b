// Modalities: the segments of one sequence as runs of text and of visual tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/visible_keys.h"
#include "index/last_q.h"
#include "minference/segment.h"

namespace minference {

class Modalities {
 public:
  // Valid segments; what lies behind the first kv_len tokens of them is cut off.
  Modalities(std::span<const Segment> segments, std::int64_t kv_len);

  // The visual segments, as given but for the cut.
  const std::vector<Segment>& visual() const { return visual_; }
  // Runs of visual tokens, ascending; segments that touch are one run.
  const std::vector<TokenRange>& visual_runs() const { return runs_; }
  bool is_visual(std::int64_t position) const;
  // Modalities among the chunk's rows, bit 0 text, bit 1 visual.
  std::uint8_t among_rows(const SequenceGeometry& geometry) const;

  // The last rows, `count` at most, of the last run of rows of this modality in the chunk; empty
  // when it has none. Rows before the sequence's first token belong to none.
  TokenRange last_rows(const SequenceGeometry& geometry, Modality modality,
                       std::int64_t count) const;

 private:
  std::vector<Segment> visual_;
  std::vector<TokenRange> runs_;
};

}  // namespace minference

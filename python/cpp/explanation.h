// What calls of attention() kept and lost, collected for the pages of a report.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "explain/attention_call.h"
#include "explain/figures.h"
#include "explain/report.h"

namespace minference::python {

class Explanation {
 public:
  // Throws InvalidArgument for a model without layers, heads or tokens, heads that it does not have or
  // too many, and unless guard_rows is 1 to kMaxGuardRows.
  Explanation(std::int64_t layers, std::int64_t q_heads, std::int64_t tokens,
              const std::vector<explain::HeadId>& shown, std::int64_t guard_rows);

  // Throws InvalidArgument unless queries of this shape in this layer can be added.
  void check(std::int64_t layer, const TensorView& q) const;

  // Adds a call that has passed check(). May be called from several threads.
  void add(const explain::AttentionCall& call);

  // Figures and maps so far; the rest of the report is the host's to fill.
  explain::ExplainReport report() const;
  explain::AttentionFigures figures() const;
  // Time that add() has taken.
  double seconds() const;

 private:
  mutable std::mutex mutex_;
  std::int64_t tokens_;
  std::int64_t guard_rows_;
  explain::AttentionFigures figures_;
  std::vector<explain::ShownHead> shown_;
  double seconds_ = 0;
};

}  // namespace minference::python

// HeadParts: the query heads of a call in parts that are worked on one after the other, so that what an
// index takes stays small beside the keys and values.
#pragma once

#include <cstdint>
#include <functional>

#include "attention/cuda/problem.h"

namespace minference::cuda {

// Device memory that an index found on the device shall not exceed: 64 MiB and a hundredth of the keys
// and values.
std::int64_t index_memory_limit(const Problem& problem);

// Query heads [first, first + count) of every sequence.
struct HeadPart {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

class HeadParts {
 public:
  // As many heads at a time as have an index within `limit`, at least one; bytes_of(part) says what the
  // index of a part of the problem takes.
  HeadParts(const Problem& problem, std::int64_t limit,
            const std::function<std::int64_t(const Problem&)>& bytes_of);

  std::int32_t heads_at_a_time() const { return at_a_time_; }

  // Calls visit(part) for one part after the other: whole groups of heads, or heads of one group.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (HeadPart part; part.first < heads_; part.first += part.count) {
      const std::int32_t left =
          at_a_time_ < group_ ? group_ - part.first % group_ : heads_ - part.first;
      part.count = at_a_time_ < left ? at_a_time_ : left;
      visit(part);
    }
  }

 private:
  std::int32_t heads_;
  std::int32_t group_;
  std::int32_t at_a_time_;
};

// The problem of these heads alone.
Problem problem_of(const Problem& problem, const HeadPart& part);

}  // namespace minference::cuda

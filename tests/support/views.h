// Parts of a Problem as calls of their own (one sequence, some rows, the first keys), and results
// compared bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "minference/attention.h"

namespace minference::test {

// View of [tokens begin ... begin + count) of sequence b.
inline TensorView tokens_of(TensorView tensor, std::int64_t b, std::int64_t begin,
                            std::int64_t count) {
  tensor.data = tensor.row(b, begin, 0);
  tensor.shape[0] = 1;
  tensor.shape[1] = count;
  return tensor;
}

// Query rows [begin, begin + count) of sequence b against its first kv_len keys. Not for pages,
// masks or lengths of several sequences.
inline AttentionInput part_of(const AttentionInput& input, std::int64_t b, std::int64_t begin,
                              std::int64_t count, std::int64_t kv_len) {
  AttentionInput part;
  part.q = tokens_of(input.q, b, begin, count);
  part.k = tokens_of(input.k, b, 0, kv_len);
  part.v = tokens_of(input.v, b, 0, kv_len);
  part.sinks = input.sinks;
  return part;
}

// The first position at which two results differ in any bit, -1 when there is none.
inline std::int64_t first_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return static_cast<std::int64_t>(std::min(a.size(), b.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

}  // namespace minference::test

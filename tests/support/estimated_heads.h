// What the tests of methods with a last-q estimate share.
#pragma once

#include <gtest/gtest.h>

#include "minference/sparse_index.h"
#include "support/problem.h"

namespace minference::test {

// Long against the budgets of the tests: random tensors spread their offsets, each of which covers 64 keys
// of a row, and an index that covers nearly everything is replaced by dense heads.
inline Case estimated() {
  Case c;
  c.q_len = 200;
  c.extra = 11800;
  c.q_heads = 4;
  c.kv_heads = 2;
  c.dim = 16;
  c.v_dim = 8;
  return c;
}

inline void expect_same_head(const HeadIndex& a, const HeadIndex& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.columns, b.columns);
  EXPECT_EQ(a.rounding, b.rounding);
  EXPECT_EQ(a.dense_last_rows, b.dense_last_rows);
  ASSERT_EQ(a.runs.size(), b.runs.size());
  for (std::size_t i = 0; i < a.runs.size(); ++i) {
    EXPECT_EQ(a.runs[i].begin, b.runs[i].begin);
    EXPECT_EQ(a.runs[i].end, b.runs[i].end);
    EXPECT_EQ(a.runs[i].stride, b.runs[i].stride);
  }
}

}  // namespace minference::test

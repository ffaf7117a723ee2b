// What the tests of the methods' selections share: planted keys, rising budgets, broken values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/problem.h"

namespace minference::test {

// Query and KV heads: groups of every size.
inline constexpr std::int64_t kGroupedHeads[][2] = {{1, 1}, {2, 1}, {3, 1}, {4, 1},  {5, 1},
                                                    {6, 1}, {7, 1}, {8, 1}, {16, 1}, {6, 2}};

// Makes key key_of(kv_head) of the only sequence outweigh all others for every query, by `size` in
// its first element.
template <class KeyOf>
void plant_keys(const Case& c, KeyOf&& key_of, float size, Problem& problem) {
  for (std::int64_t h = 0; h < c.kv_heads; ++h) {
    const std::int64_t key = key_of(h);
    const std::int64_t page = c.page_size == 0 ? 0 : problem.block_table[key / c.page_size];
    problem.k.set(page, c.page_size == 0 ? key : key % c.page_size, h, 0, size);
  }
  for (std::int64_t t = 0; t < c.q_len; ++t) {
    for (std::int64_t h = 0; h < c.q_heads; ++h) problem.q.set(0, t, h, 0, 4);
  }
}

// Expects that no head's recall is below `previous`, which becomes `recall`.
inline void expect_no_less(const std::vector<double>& recall, std::vector<double>& previous,
                           const std::string& what) {
  for (std::size_t h = 0; h < recall.size(); ++h) {
    EXPECT_GE(recall[h], previous[h] - 1e-6) << what << ", head " << h;
    EXPECT_LE(recall[h], 1 + 1e-6) << what << ", head " << h;
  }
  previous = recall;
}

inline constexpr float kBrokenValues[] = {std::numeric_limits<float>::quiet_NaN(),
                                          std::numeric_limits<float>::infinity(), 3e38F, -3e38F};

// A problem of one sequence with `value` in some keys of head 0 and queries of head 1.
inline Problem make_broken_problem(const Case& c, float value) {
  Problem problem = make_problem(c);
  for (const std::int64_t t : {std::int64_t{0}, c.q_len / 5, c.q_len * 3 / 5, c.q_len - 1}) {
    problem.k.set(0, t, 0, 3, value);
    problem.q.set(0, t, 1, 5, value);
  }
  return problem;
}

}  // namespace minference::test

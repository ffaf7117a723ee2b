// AttentionMap and kept_pairs() against fp64 probabilities and sums over the explicit mask.
#include "guard/attention_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/kept_pairs.h"
#include "attention/reference/reference.h"
#include "minference/error.h"
#include "support/problem.h"

namespace minference::test {
namespace {

constexpr Pattern kPatterns[] = {Pattern::kNone,      Pattern::kDenseHeads, Pattern::kAShape,
                                 Pattern::kUnionRuns, Pattern::kExactRuns,  Pattern::kStridedRuns,
                                 Pattern::kBlocks,    Pattern::kMixed};

// Compares the map with sums over the cells; the call's rows are the last ones of the map's tokens,
// and rows before them were not added.
void expect_map(const AttentionMap& map, const Problem& problem, std::int64_t h) {
  const AttentionInput input = problem.input();
  const std::int64_t size = map.size();
  const std::int64_t kv_len = key_length(input, 0);
  const std::int64_t first = kv_len - query_length(input, 0);
  const std::vector<std::uint8_t> dense = explicit_mask(input, problem.params, 0, h, nullptr);
  const std::vector<std::uint8_t> kept =
      explicit_mask(input, problem.params, 0, h, problem.index());
  std::int64_t cells = 0;
  for (std::int64_t row = 0; row < size; ++row) {
    std::vector<double> mass(size);
    std::vector<double> lost(size);
    std::vector<double> pairs(size);
    std::vector<double> kept_pairs(size);
    double sampled = 0;
    for (std::int64_t position = map.begin(row); position < map.begin(row + 1); ++position) {
      if (position < first) continue;
      const std::int64_t q = position - first;
      const bool is_sampled = position < map.begin(row) + AttentionMap::kSampledRows;
      const std::vector<double> p = row_probabilities(input, problem.params, 0, h, q);
      sampled += is_sampled ? 1 : 0;
      std::int64_t column = 0;
      for (std::int64_t key = 0; key < kv_len; ++key) {
        while (key >= map.begin(column + 1)) ++column;
        const bool is_kept = kept[q * kv_len + key] != 0;
        pairs[column] += dense[q * kv_len + key];
        kept_pairs[column] += is_kept ? 1 : 0;
        if (is_sampled) mass[column] += p[key];
        if (is_sampled && !is_kept) lost[column] += p[key];
      }
    }
    for (std::int64_t column = 0; column < size; ++column) {
      SCOPED_TRACE("cell " + std::to_string(row) + ", " + std::to_string(column));
      ASSERT_EQ(map.visible(row, column), pairs[column] > 0);
      if (pairs[column] == 0) continue;
      ++cells;
      ASSERT_DOUBLE_EQ(map.kept(row, column), kept_pairs[column] / pairs[column]);
      ASSERT_NEAR(map.mass(row, column), sampled > 0 ? mass[column] / sampled : 0, 1e-5);
      ASSERT_NEAR(map.lost(row, column), sampled > 0 ? lost[column] / sampled : 0, 1e-5);
    }
  }
  EXPECT_GT(cells, 0);
}

void expect_exact(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  for (const std::int64_t h : {std::int64_t{0}, c.q_heads - 1}) {
    AttentionMap map(c.q_len + c.extra);
    map.add(problem.input(), problem.params, problem.index(), h);
    expect_map(map, problem, h);
  }
}

TEST(AttentionMap, EveryForm) {
  for (const Pattern pattern : kPatterns) {
    Case c = six_heads(pattern);
    c.q_len = 150;
    c.extra = 0;
    c.dense_last_rows = pattern == Pattern::kBlocks ? 7 : 0;
    expect_exact(c);
  }
}

// Cells of one or two positions, and a chunk that begins in the middle of a cell.
TEST(AttentionMap, LongerThanItsSide) {
  for (const std::int64_t extra : {0, 201}) {
    Case c = six_heads(Pattern::kMixed);
    c.q_len = 300 - extra / 3;
    c.extra = extra;
    c.dim = 16;
    expect_exact(c);
    c.window = 40;
    c.soft_cap = 3;
    expect_exact(c);
  }
}

// Only some rows of a row of cells are sampled, and every row counts in what is kept.
TEST(AttentionMap, SamplesLongPrompts) {
  Case c = six_heads(Pattern::kAShape);
  c.q_len = 100;
  c.extra = 256 * 40 - 100;
  c.dim = 16;
  expect_exact(c);
}

TEST(AttentionMap, ChunksGiveWhatTheWholeGives) {
  Case c;
  c.q_len = 500;
  c.extra = 0;
  const Problem problem = make_problem(c);
  const AttentionInput whole = problem.input();
  AttentionMap one(500);
  one.add(whole, problem.params, nullptr, 1);
  AttentionMap many(500);
  for (const auto& [begin, end] : {std::pair{0, 199}, {199, 200}, {200, 500}}) {
    AttentionInput chunk = whole;
    chunk.q.data = whole.q.row(0, begin, 0);
    chunk.q.shape[1] = end - begin;
    chunk.k.shape[1] = end;
    chunk.v.shape[1] = end;
    many.add(chunk, problem.params, nullptr, 1);
  }
  for (std::int64_t row = 0; row < one.size(); ++row) {
    for (std::int64_t column = 0; column < one.size(); ++column) {
      ASSERT_EQ(many.visible(row, column), one.visible(row, column));
      ASSERT_NEAR(many.mass(row, column), one.mass(row, column), 1e-5);
    }
  }
}

TEST(AttentionMap, RefusesWhatIsNotItsPrompt) {
  EXPECT_THROW(AttentionMap(0), InvalidArgument);
  Case c;
  const Problem problem = make_problem(c);
  AttentionMap map(c.q_len + c.extra - 1);
  EXPECT_THROW(map.add(problem.input(), problem.params, nullptr, 0), InvalidArgument);
}

TEST(KeptPairs, IsTheMaskSummed) {
  for (const Pattern pattern : kPatterns) {
    Case c = six_heads(pattern);
    c.batch = 3;
    c.lengths = Lengths::kRagged;
    c.q_len = 140;
    c.extra = 70;
    c.dense_last_rows = 9;
    SCOPED_TRACE(describe(c));
    const Problem problem = make_problem(c);
    const AttentionInput input = problem.input();
    const std::vector<std::int64_t> pairs = kept_pairs(input, problem.params, problem.index());
    ASSERT_EQ(static_cast<std::int64_t>(pairs.size()), c.batch * c.q_heads);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        const std::vector<std::uint8_t> mask =
            explicit_mask(input, problem.params, b, h, problem.index());
        EXPECT_EQ(pairs[b * c.q_heads + h],
                  std::accumulate(mask.begin(), mask.end(), std::int64_t{0}));
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

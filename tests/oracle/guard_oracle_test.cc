// mass_recall() against fp64 probabilities over the explicit mask.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "minference/error.h"
#include "minference/guard.h"
#include "support/problem.h"
#include "support/recall_oracle.h"

namespace minference::test {
namespace {

void expect_exact(const Case& c, std::int64_t rows) {
  SCOPED_TRACE(describe(c) + ", sampled rows " + std::to_string(rows));
  const Problem problem = make_problem(c);
  const std::vector<double> recall =
      mass_recall(problem.input(), problem.params, *problem.index(), rows);
  const std::vector<double> expected = exact_recall(problem, {rows, 1});
  ASSERT_EQ(recall.size(), expected.size());
  for (std::size_t i = 0; i < recall.size(); ++i) {
    EXPECT_NEAR(recall[i], expected[i], 1e-5) << "head " << i;
  }
}

TEST(MassRecall, AllRows) {
  for (const Pattern pattern :
       {Pattern::kDenseHeads, Pattern::kAShape, Pattern::kUnionRuns, Pattern::kExactRuns,
        Pattern::kStridedRuns, Pattern::kBlocks, Pattern::kMixed}) {
    Case c;
    c.q_len = 60;
    c.extra = 200;
    c.q_heads = 6;
    c.pattern = pattern;
    expect_exact(c, 60);
    expect_exact(c, kMaxGuardRows);
    c.q_len = 200;
    expect_exact(c, 1);
    expect_exact(c, 7);
  }
}

TEST(MassRecall, BatchesPagesAndRowsThatSeeNothing) {
  Case c;
  c.pattern = Pattern::kExactRuns;
  c.batch = 3;
  c.q_len = 50;
  c.lengths = Lengths::kRagged;
  c.page_size = 16;
  c.dense_last_rows = 7;
  expect_exact(c, 50);
  c.lengths = Lengths::kFull;
  c.extra = -20;
  expect_exact(c, 50);
  c.extra = -50;
  expect_exact(c, 50);
}

TEST(MassRecall, SoftCapAndWindow) {
  Case c;
  c.pattern = Pattern::kUnionRuns;
  c.q_len = 50;
  c.extra = 100;
  c.soft_cap = 3;
  expect_exact(c, 50);
  c.window = 70;
  expect_exact(c, 50);
}

// More keys than a task takes, and more rows of a KV head than a block.
TEST(MassRecall, LongPromptsAndManyHeads) {
  for (const Pattern pattern : {Pattern::kUnionRuns, Pattern::kBlocks, Pattern::kMixed}) {
    Case c;
    c.dim = 16;
    c.q_len = 40;
    c.extra = 9000;
    c.q_heads = 7;
    c.kv_heads = 1;
    c.pattern = pattern;
    expect_exact(c, 20);
    c.window = 500;
    expect_exact(c, 33);
    c.window = 5000;
    expect_exact(c, 1);
  }
}

TEST(MassRecall, DenseIsOneAndNothingIsZero) {
  Case c;
  c.pattern = Pattern::kDenseHeads;
  Problem problem = make_problem(c);
  for (const double recall : mass_recall(problem.input(), problem.params, *problem.index(), 8)) {
    EXPECT_EQ(recall, 1.0);
  }
  c.pattern = Pattern::kExactRuns;
  c.budget = Budget::kNothing;
  problem = make_problem(c);
  for (const double recall : mass_recall(problem.input(), problem.params, *problem.index(), 8)) {
    EXPECT_EQ(recall, 0.0);
  }
}

TEST(MassRecall, RefusesWhatAttentionRefuses) {
  Case c;
  c.pattern = Pattern::kUnionRuns;
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  EXPECT_THROW(mass_recall(input, problem.params, *problem.index(), 0), InvalidArgument);
  EXPECT_THROW(mass_recall(input, problem.params, *problem.index(), -5), InvalidArgument);
  EXPECT_THROW(mass_recall(input, problem.params, *problem.index(), 65), InvalidArgument);
  AttentionInput bad = input;
  bad.k.shape[3] = 32;
  EXPECT_THROW(mass_recall(bad, problem.params, *problem.index(), 8), InvalidArgument);
  SparseIndex wrong = *problem.index();
  wrong.head(0, 0).columns = {100000};
  EXPECT_THROW(mass_recall(input, problem.params, wrong, 8), InvalidArgument);
}

TEST(Guard, ReportsAndEnforces) {
  Case c;
  c.q_len = 1024;  // 8 rows, one in 128
  c.q_heads = 6;
  c.pattern = Pattern::kAShape;
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  const std::vector<double> recall = mass_recall(input, problem.params, *problem.index(), 8);
  const double lowest = *std::min_element(recall.begin(), recall.end());
  const double highest = *std::max_element(recall.begin(), recall.end());
  ASSERT_LT(lowest, highest);
  const double limit = (lowest + highest) / 2;

  SparseIndex index = *problem.index();
  Stats stats;
  guard(input, problem.params, {GuardMode::kOff, 8, limit}, index, stats);
  EXPECT_EQ(stats.recall_count, 0);
  guard(input, problem.params, {GuardMode::kReport, 8, limit}, index, stats);
  EXPECT_EQ(stats.recall_count, 6);
  EXPECT_DOUBLE_EQ(stats.recall_sum, std::accumulate(recall.begin(), recall.end(), 0.0));
  EXPECT_TRUE(stats.fallbacks.empty());

  guard(input, problem.params, {GuardMode::kEnforce, 8, limit}, index, stats);
  std::int64_t replaced = 0;
  for (std::size_t i = 0; i < recall.size(); ++i) {
    const bool dense = index.heads[i].kind == HeadIndex::Kind::kDense;
    EXPECT_EQ(dense, recall[i] < limit) << "head " << i;
    replaced += dense ? 1 : 0;
  }
  ASSERT_EQ(stats.fallbacks.size(), 1U);
  EXPECT_EQ(stats.fallbacks.begin()->second, replaced);
  for (const double after : mass_recall(input, problem.params, index, 8)) EXPECT_GE(after, limit);

  for (const double bad : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THROW(guard(input, problem.params, {GuardMode::kEnforce, 8, bad}, index, stats),
                 InvalidArgument);
  }
}

// As many rows as asked for, but at most one in 128 and at least one.
TEST(Guard, SamplesFewerRowsOfShortChunks) {
  for (const auto& [q_len, rows] : {std::pair{2048, 16}, {2047, 15}, {512, 4}, {255, 1}, {1, 1}}) {
    Case c;
    c.q_len = q_len;
    c.extra = 100;
    c.pattern = Pattern::kAShape;
    const Problem problem = make_problem(c);
    SparseIndex index = *problem.index();
    const std::vector<double> recall = mass_recall(problem.input(), problem.params, index, rows);
    Stats stats;
    guard(problem.input(), problem.params, {GuardMode::kReport, 16, 0.9}, index, stats);
    EXPECT_DOUBLE_EQ(stats.recall_sum, std::accumulate(recall.begin(), recall.end(), 0.0)) << q_len;
  }
}

}  // namespace
}  // namespace minference::test

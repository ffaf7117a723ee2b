#include "minference/sparse_index.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "minference/error.h"

namespace minference {
namespace {

using Runs = std::vector<OffsetRun>;

std::string text(const Runs& runs) {
  std::ostringstream result;
  for (const OffsetRun& run : runs) result << "[" << run.begin << "," << run.end << ")";
  return result.str();
}

TEST(OffsetRun, ContainsEveryStrideth) {
  const OffsetRun run{10, 20, 3};
  for (std::int64_t offset = 0; offset < 30; ++offset) {
    const bool expected = offset == 10 || offset == 13 || offset == 16 || offset == 19;
    EXPECT_EQ(run.contains(offset), expected) << offset;
  }
}

TEST(MergeRuns, SortsAndJoins) {
  EXPECT_EQ(text(merge_runs({})), "");
  EXPECT_EQ(text(merge_runs({{5, 7}, {0, 2}})), "[0,2)[5,7)");
  EXPECT_EQ(text(merge_runs({{0, 2}, {2, 4}})), "[0,4)");             // touching
  EXPECT_EQ(text(merge_runs({{0, 10}, {3, 5}, {9, 12}})), "[0,12)");  // inside, overlapping
  EXPECT_EQ(text(merge_runs({{4, 5}, {4, 5}})), "[4,5)");             // repeated
  EXPECT_EQ(text(merge_runs({{3, 3}, {5, 4}})), "");                  // empty runs go
}

TEST(MergeRuns, ClosesGapsUpToTheLimit) {
  const Runs runs = {{0, 2}, {5, 6}, {10, 11}};
  EXPECT_EQ(text(merge_runs(runs, 2)), "[0,2)[5,6)[10,11)");
  EXPECT_EQ(text(merge_runs(runs, 3)), "[0,6)[10,11)");
  EXPECT_EQ(text(merge_runs(runs, 4)), "[0,11)");
}

TEST(MergeRuns, SurvivesTheLimitsOfTheType) {
  const std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  const Runs far = {{lowest, lowest + 1}, {largest - 1, largest}};
  EXPECT_EQ(merge_runs(far, 0).size(), 2U);
  EXPECT_EQ(merge_runs(far, 1000).size(), 2U);
}

TEST(MergeRuns, RefusesStridesAndNegativeGaps) {
  EXPECT_THROW(merge_runs({{0, 10, 2}}), InvalidArgument);
  EXPECT_THROW(merge_runs({{0, 10}}, -1), InvalidArgument);
}

TEST(MergeRuns, RandomRunsKeepTheirOffsets) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Runs runs;
    std::vector<bool> covered(200, false);
    for (int i = 0; i < 12; ++i) {
      const std::int64_t begin = random() % 150;
      const std::int64_t end = begin + random() % 20;
      runs.push_back({begin, end});
      for (std::int64_t offset = begin; offset < end; ++offset) covered[offset] = true;
    }
    const Runs merged = merge_runs(runs);
    std::vector<bool> merged_covered(200, false);
    std::int64_t previous_end = -1;
    for (const OffsetRun& run : merged) {
      EXPECT_GT(run.begin, previous_end);  // neither overlapping nor touching
      EXPECT_LT(run.begin, run.end);
      previous_end = run.end;
      for (std::int64_t offset = run.begin; offset < run.end; ++offset) {
        merged_covered[offset] = true;
      }
    }
    EXPECT_EQ(merged_covered, covered);
  }
}

// An index of 2 sequences with 3 heads over 100 rows and 200 keys, head 4 of which is `head`.
SparseIndex index_with(const HeadIndex& head) {
  SparseIndex index;
  index.batch = 2;
  index.q_heads = 3;
  index.heads.resize(6);
  index.head(1, 1) = head;
  return index;
}

HeadIndex diagonal() {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.columns = {0, 7, 199};
  head.runs = {{0, 10}, {10, 20}, {64, 1000}};
  return head;
}

HeadIndex block() {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kBlock;
  head.block_begin = {0, 2, 3};  // 100 rows are two row blocks, 200 keys four key blocks
  head.block_ids = {0, 3, 1};
  return head;
}

// Expects that an index with this head is refused, naming the head, with `words` in the message.
void expect_refused(const HeadIndex& head, const std::string& words) {
  try {
    validate(index_with(head), 2, 3, 100, 200);
    FAIL() << "not refused: " << words;
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("sequence 1, query head 1"), std::string::npos) << what;
    EXPECT_NE(what.find(words), std::string::npos) << what;
  }
}

void expect_columns_refused(const std::vector<std::int64_t>& columns, const std::string& words) {
  HeadIndex head = diagonal();
  head.columns = columns;
  expect_refused(head, words);
}

void expect_runs_refused(const Runs& runs, const std::string& words, bool exact = false) {
  HeadIndex head = diagonal();
  head.runs = runs;
  head.rounding = exact ? RunRounding::kNone : RunRounding::kGranule;
  expect_refused(head, words);
}

void expect_blocks_refused(const std::vector<std::int64_t>& begin,
                           const std::vector<std::int32_t>& ids, const std::string& words) {
  HeadIndex head = block();
  head.block_begin = begin;
  head.block_ids = ids;
  expect_refused(head, words);
}

TEST(ValidateIndex, AcceptsWhatIsWellFormed) {
  validate(index_with(HeadIndex()), 2, 3, 100, 200);
  validate(index_with(diagonal()), 2, 3, 100, 200);
  validate(index_with(block()), 2, 3, 100, 200);
  HeadIndex strided = diagonal();
  strided.rounding = RunRounding::kNone;
  strided.runs = {{0, 10, 1}, {10, 30, 2}};
  strided.dense_last_rows = 1000;
  validate(index_with(strided), 2, 3, 100, 200);
  HeadIndex nothing = diagonal();
  nothing.columns.clear();
  nothing.runs.clear();
  validate(index_with(nothing), 2, 3, 100, 200);
}

TEST(ValidateIndex, RefusesAnotherShape) {
  const SparseIndex index = index_with(HeadIndex());
  EXPECT_THROW(validate(index, 1, 3, 100, 200), InvalidArgument);
  EXPECT_THROW(validate(index, 2, 6, 100, 200), InvalidArgument);
  SparseIndex short_index = index;
  short_index.heads.pop_back();
  EXPECT_THROW(validate(short_index, 2, 3, 100, 200), InvalidArgument);
}

TEST(ValidateIndex, RefusesColumns) {
  expect_columns_refused({0, 200}, "column is 200; legal: 0 to 199");
  expect_columns_refused({-1, 5}, "column is -1");
  expect_columns_refused({5, 3}, "column 3 follows 5");
  expect_columns_refused({5, 5}, "column 5 follows 5");
}

TEST(ValidateIndex, RefusesRuns) {
  expect_runs_refused({{-1, 5}}, "[-1, 5)");
  expect_runs_refused({{5, 5}}, "[5, 5)");
  expect_runs_refused({{0, std::numeric_limits<std::int64_t>::max()}}, "2^62");
  expect_runs_refused({{0, 9, 2}}, "where runs are rounded");
  expect_runs_refused({{4, 9}, {8, 12}}, "without overlap");
  expect_runs_refused({{8, 9}, {1, 2}}, "without overlap");
  expect_runs_refused({{0, 9, 0}}, "legal strides", true);
  expect_runs_refused({{0, 9, -2}}, "legal strides", true);
}

TEST(ValidateIndex, RefusesBlocks) {
  expect_blocks_refused({0, 3}, {0, 3, 1}, "has 2 entries; legal: row blocks + 1 = 3");
  expect_blocks_refused({}, {0, 3, 1}, "has 0 entries");
  expect_blocks_refused({1, 2, 3}, {0, 3, 1}, "from 1 to 3");
  expect_blocks_refused({0, 2, 4}, {0, 3, 1}, "from 0 to 4");
  expect_blocks_refused({0, 4, 3}, {0, 3, 1}, "falls from 4 to 3");
  expect_blocks_refused({0, 2, 3}, {0, 4, 1}, "block id is 4 in row block 0; legal: 0 to 3");
  expect_blocks_refused({0, 2, 3}, {0, -1, 1}, "block id is -1");
  expect_blocks_refused({0, 2, 3}, {3, 0, 1}, "block id 0 follows 3");
}

TEST(ValidateIndex, RefusesOtherFields) {
  HeadIndex head = diagonal();
  head.dense_last_rows = -1;
  expect_refused(head, "dense_last_rows is -1");
  head = diagonal();
  head.kind = static_cast<HeadIndex::Kind>(9);
  expect_refused(head, "kind is 9");
}

}  // namespace
}  // namespace minference

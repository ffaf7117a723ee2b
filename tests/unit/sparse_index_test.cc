#include "minference/sparse_index.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <string>

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
  EXPECT_EQ(text(merge_runs({{0, 2}, {2, 4}})), "[0,4)");            // touching
  EXPECT_EQ(text(merge_runs({{0, 10}, {3, 5}, {9, 12}})), "[0,12)");  // inside, overlapping
  EXPECT_EQ(text(merge_runs({{4, 5}, {4, 5}})), "[4,5)");            // repeated
  EXPECT_EQ(text(merge_runs({{3, 3}, {5, 4}})), "");                // empty runs go
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

// Expects a refusal of an index with `head` changed, naming the head and containing `words`.
void expect_refused(HeadIndex head, const std::function<void(HeadIndex&)>& change,
                    const std::string& words) {
  change(head);
  try {
    validate(index_with(head), 2, 3, 100, 200);
    FAIL() << "not refused: " << words;
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("sequence 1, query head 1"), std::string::npos) << what;
    EXPECT_NE(what.find(words), std::string::npos) << what;
  }
}

TEST(ValidateIndex, AcceptsWhatIsWellFormed) {
  validate(index_with(HeadIndex()), 2, 3, 100, 200);
  validate(index_with(diagonal()), 2, 3, 100, 200);
  validate(index_with(block()), 2, 3, 100, 200);
  HeadIndex strided = diagonal();
  strided.exact_runs = true;
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
  expect_refused(diagonal(), [](HeadIndex& h) { h.columns = {0, 200}; }, "column is 200");
  expect_refused(diagonal(), [](HeadIndex& h) { h.columns = {-1, 5}; }, "column is -1");
  expect_refused(diagonal(), [](HeadIndex& h) { h.columns = {5, 3}; }, "column 3 follows 5");
  expect_refused(diagonal(), [](HeadIndex& h) { h.columns = {5, 5}; }, "column 5 follows 5");
}

TEST(ValidateIndex, RefusesRuns) {
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{-1, 5}}; }, "[-1, 5)");
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{5, 5}}; }, "[5, 5)");
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{0, INT64_MAX}}; }, "2^62");
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{0, 9, 2}}; }, "unless runs are exact");
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{4, 9}, {8, 12}}; }, "without overlap");
  expect_refused(diagonal(), [](HeadIndex& h) { h.runs = {{8, 9}, {1, 2}}; }, "without overlap");
  expect_refused(
      diagonal(),
      [](HeadIndex& h) {
        h.exact_runs = true;
        h.runs = {{0, 9, 0}};
      },
      "legal strides");
}

TEST(ValidateIndex, RefusesBlocks) {
  expect_refused(block(), [](HeadIndex& h) { h.block_begin = {0, 3}; }, "has 2 entries");
  expect_refused(block(), [](HeadIndex& h) { h.block_begin = {}; }, "has 0 entries");
  expect_refused(block(), [](HeadIndex& h) { h.block_begin = {1, 2, 3}; }, "from 1 to 3");
  expect_refused(block(), [](HeadIndex& h) { h.block_begin = {0, 2, 4}; }, "from 0 to 4");
  expect_refused(block(), [](HeadIndex& h) { h.block_begin = {0, 4, 3}; }, "falls from 4 to 3");
  expect_refused(block(), [](HeadIndex& h) { h.block_ids = {0, 4, 1}; }, "block id is 4");
  expect_refused(block(), [](HeadIndex& h) { h.block_ids = {0, -1, 1}; }, "block id is -1");
  expect_refused(block(), [](HeadIndex& h) { h.block_ids = {3, 0, 1}; }, "block id 0 follows 3");
}

TEST(ValidateIndex, RefusesOtherFields) {
  expect_refused(diagonal(), [](HeadIndex& h) { h.dense_last_rows = -1; }, "dense_last_rows is -1");
  expect_refused(
      diagonal(), [](HeadIndex& h) { h.kind = static_cast<HeadIndex::Kind>(9); }, "kind is 9");
}

}  // namespace
}  // namespace minference

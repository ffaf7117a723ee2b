// The indices of the methods against a plain fp64 computation of their published rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/reference/reference.h"
#include "minference/method.h"
#include "support/problem.h"

namespace minference::test {
namespace {

constexpr std::int64_t kLastQ = 64;
constexpr std::int64_t kForcedColumns = 30;
constexpr std::int64_t kForcedOffsets = 100;

SparseIndex build(const char* method, const Problem& problem, const MethodOptions& options,
                  const MethodContext& context = {}) {
  const Method& found = find_method(method);
  return found.build_index(problem.input(), problem.params, resolve_options(found, options),
                           context);
}

// Mass of the softmax of the last 64 query rows, by key and by offset.
struct Estimate {
  std::vector<double> columns;
  std::vector<double> offsets;
};

Estimate estimate(const AttentionInput& input, const AttentionParams& params, std::int64_t b,
                  std::int64_t h) {
  const std::int64_t q_len = query_length(input, b);
  const std::int64_t kv_len = key_length(input, b);
  Estimate result;
  result.columns.assign(kv_len, 0.0);
  result.offsets.assign(kv_len, 0.0);
  for (std::int64_t row = std::max<std::int64_t>(0, q_len - kLastQ); row < q_len; ++row) {
    const std::int64_t position = kv_len - q_len + row;
    const std::vector<double> scores = row_scores(input, params, b, h, row);
    double maximum = -INFINITY;
    double sum = 0;
    for (std::int64_t key = 0; key <= position; ++key) maximum = std::max(maximum, scores[key]);
    for (std::int64_t key = 0; key <= position; ++key) sum += std::exp(scores[key] - maximum);
    for (std::int64_t key = 0; key <= position; ++key) {
      const double probability = std::exp(scores[key] - maximum) / sum;
      result.columns[key] += probability;
      result.offsets[position - key] += probability;
    }
  }
  return result;
}

// The `budget` largest, where the first `forced` beat everything and a smaller budget is raised to
// them, ascending. `gap`: how clearly the smallest one taken beats the largest one left.
std::vector<std::int64_t> heaviest(std::vector<double> mass, std::int64_t forced,
                                   std::int64_t budget, double* gap) {
  std::fill_n(mass.begin(), forced, INFINITY);
  budget = std::max(budget, forced);
  std::vector<std::int64_t> order(mass.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t c) { return mass[a] > mass[c]; });
  *gap = mass[order[budget - 1]] / mass[order[budget]] - 1;
  order.resize(budget);
  std::sort(order.begin(), order.end());
  return order;
}

bool covers(const std::vector<OffsetRun>& runs, std::int64_t offset) {
  return std::any_of(runs.begin(), runs.end(),
                     [=](const OffsetRun& run) { return run.contains(offset); });
}

// A head keeps exactly the columns of the rule. Its runs contain the offsets of the rule, and cover
// no more of a whole row block than those do: joining runs may only close gaps that are covered.
void expect_rule(const HeadIndex& head, const Estimate& mass, std::int64_t vertical,
                 std::int64_t slash) {
  ASSERT_EQ(head.kind, HeadIndex::Kind::kDiagonal);
  double column_gap = 0;
  double offset_gap = 0;
  const std::vector<std::int64_t> columns =
      heaviest(mass.columns, kForcedColumns, vertical, &column_gap);
  const std::vector<std::int64_t> offsets =
      heaviest(mass.offsets, kForcedOffsets, slash, &offset_gap);
  // Otherwise f32 could fairly take another one, and this case would prove nothing.
  ASSERT_GT(column_gap, 2e-6);
  ASSERT_GT(offset_gap, 2e-6);
  EXPECT_EQ(head.columns, columns);
  EXPECT_FALSE(head.exact_runs);
  for (const std::int64_t offset : offsets) EXPECT_TRUE(covers(head.runs, offset)) << offset;
  const auto kv_len = static_cast<std::int64_t>(mass.columns.size());
  for (std::int64_t offset = 0; offset < kv_len; ++offset) {
    if (!covers(head.runs, offset)) continue;
    // The rows of a block see a key at 64 consecutive offsets. An offset that was not taken adds
    // nothing if each 64 consecutive ones around it contain a taken one.
    const auto above = std::lower_bound(offsets.begin(), offsets.end(), offset);
    const std::int64_t next = above == offsets.end() ? kv_len + kRowBlock : *above;
    const std::int64_t previous = above == offsets.begin() ? -kRowBlock : *(above - 1);
    EXPECT_TRUE(next == offset || next - previous <= kRowBlock) << offset;
  }
}

// Long against the budgets below: random tensors spread their offsets, each of which covers 64 keys
// of a row, and an index that covers nearly everything is replaced by dense heads.
Case estimated() {
  Case c;
  c.q_len = 200;
  c.extra = 11800;
  c.q_heads = 4;
  c.kv_heads = 2;
  c.dim = 16;
  c.v_dim = 8;
  return c;
}

TEST(VerticalSlash, TakesTheHeaviestColumnsAndOffsets) {
  for (const std::int64_t extra : {0, 11800}) {
    for (const auto& [vertical, slash] : {std::pair{40, 120}, {300, 140}, {0, 0}, {31, 101}}) {
      Case c = estimated();
      c.q_len = extra == 0 ? 5000 : 200;
      c.extra = extra;
      c.seed = 8 + vertical;
      SCOPED_TRACE(describe(c) + ", budgets " + std::to_string(vertical) + " " +
                   std::to_string(slash));
      const Problem problem = make_problem(c);
      const SparseIndex index = build("vertical_slash", problem,
                                      {{"vertical_size", static_cast<double>(vertical)},
                                       {"slash_size", static_cast<double>(slash)}});
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        if (vertical == 0) {  // the forced sets and nothing else
          EXPECT_EQ(index.head(0, h).columns.size(), 30U);
          ASSERT_EQ(index.head(0, h).runs.size(), 1U);
          EXPECT_EQ(index.head(0, h).runs[0].begin, 0);
          EXPECT_EQ(index.head(0, h).runs[0].end, 100);
          continue;
        }
        expect_rule(index.head(0, h), estimate(problem.input(), problem.params, 0, h), vertical,
                    slash);
      }
    }
  }
}

TEST(VerticalSlash, EstimatesFromShortChunksToo) {
  for (const std::int64_t q_len : {1, 7, 63, 64, 65}) {
    Case c = estimated();
    c.q_len = q_len;
    c.extra = 12000 - q_len;
    const Problem problem = make_problem(c);
    const SparseIndex index =
        build("vertical_slash", problem, {{"vertical_size", 60}, {"slash_size", 150}});
    SCOPED_TRACE(describe(c));
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      expect_rule(index.head(0, h), estimate(problem.input(), problem.params, 0, h), 60, 150);
    }
  }
}

TEST(VerticalSlash, SequencesOfABatchHaveTheirOwn) {
  Case c = estimated();
  c.batch = 3;
  c.lengths = Lengths::kRagged;
  c.q_len = 4000;
  c.soft_cap = 20;
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  const SparseIndex index =
      build("vertical_slash", problem, {{"vertical_size", 50}, {"slash_size", 120}});
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      SCOPED_TRACE(describe(c) + ", sequence " + std::to_string(b));
      expect_rule(index.head(b, h), estimate(input, problem.params, b, h), 50, 120);
    }
  }
}

TEST(VerticalSlash, ScoresInBf16PickNearlyTheSame) {
  Case c = estimated();
  c.q_dtype = c.kv_dtype = DType::kBF16;
  const Problem problem = make_problem(c);
  const SparseIndex index =
      build("vertical_slash", problem, {{"vertical_size", 100}, {"slash_size", 200}});
  for (std::int64_t h = 0; h < c.q_heads; ++h) {
    const Estimate mass = estimate(problem.input(), problem.params, 0, h);
    double gap = 0;
    const std::vector<std::int64_t> columns = heaviest(mass.columns, kForcedColumns, 100, &gap);
    std::vector<std::int64_t> common;
    std::set_intersection(columns.begin(), columns.end(), index.head(0, h).columns.begin(),
                          index.head(0, h).columns.end(), std::back_inserter(common));
    // Only columns whose mass lies within a bf16 rounding of the threshold may be exchanged.
    EXPECT_GE(common.size(), 98U) << "head " << h;
    EXPECT_EQ(index.head(0, h).columns.size(), 100U);
  }
}

TEST(AShape, KeepsSinksAndTheLocalWindow) {
  for (const auto& [n_init, n_local] : {std::pair{5, 20}, {0, 1}, {64, 64}, {1, 300}}) {
    Case c;
    c.batch = 2;
    c.lengths = Lengths::kRagged;
    c.q_len = 300;
    c.extra = 200;
    c.dim = c.v_dim = 8;
    const Problem problem = make_problem(c);
    const AttentionInput input = problem.input();
    const SparseIndex index =
        build("a_shape", problem,
              {{"n_init", static_cast<double>(n_init)}, {"n_local", static_cast<double>(n_local)}});
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::int64_t q_len = query_length(input, b);
      const std::int64_t kv_len = key_length(input, b);
      const std::vector<std::uint8_t> mask = explicit_mask(input, problem.params, b, 1, &index);
      for (std::int64_t row = 0; row < q_len; ++row) {
        const std::int64_t position = kv_len - q_len + row;
        for (std::int64_t key = 0; key < kv_len; ++key) {
          const bool expected = key <= position && (key < n_init || position - key < n_local);
          ASSERT_EQ(mask[row * kv_len + key] != 0, expected)
              << n_init << " + " << n_local << ": row " << row << ", key " << key;
        }
      }
    }
  }
}

TEST(MInference, FollowsThePatternOfEachHead) {
  const Case c = estimated();
  const Problem problem = make_problem(c);
  const PatternFile patterns = PatternFile::parse(R"([
    {},
    {"0": ["vertical_and_slash", 50, 130, 1], "1": ["stream_llm", 40, 90, 1],
     "2": ["vertical_and_slash", 10, 20, 1]}
  ])",
                                                  "toy.json");
  MethodContext context;
  context.patterns = &patterns;
  context.layer = 1;
  const auto mass = [&](std::int64_t h) { return estimate(problem.input(), problem.params, 0, h); };
  {
    const SparseIndex index = build("minference", problem, {}, context);
    expect_rule(index.head(0, 0), mass(0), 50, 130);
    EXPECT_EQ(index.head(0, 1).columns.size(), 40U);
    EXPECT_TRUE(index.head(0, 1).exact_runs);
    ASSERT_EQ(index.head(0, 1).runs.size(), 1U);
    EXPECT_EQ(index.head(0, 1).runs[0].end, 90);
    EXPECT_EQ(index.head(0, 2).columns.size(), 30U);  // raised to the forced counts
    EXPECT_TRUE(covers(index.head(0, 2).runs, 99));
    // Head 3 is not in the file: the default (1000, 6096) covers nearly all of 12000 keys.
    EXPECT_EQ(index.head(0, 3).kind, HeadIndex::Kind::kDense);
  }
  {
    const SparseIndex index = build("minference", problem, {{"minference_ratio", 2}}, context);
    expect_rule(index.head(0, 0), mass(0), 100, 260);
    EXPECT_EQ(index.head(0, 1).columns.size(), 80U);
  }
  {
    const SparseIndex index = build("minference", problem, {{"minference_ratio", 0.1}}, context);
    EXPECT_EQ(index.head(0, 0).columns.size(), 30U);  // a ratio never loses the forced sets
    EXPECT_TRUE(covers(index.head(0, 0).runs, 0));
    EXPECT_TRUE(covers(index.head(0, 0).runs, 99));
  }
  {
    const SparseIndex index = build("minference", problem, {{"starting_layer", 2}}, context);
    for (const HeadIndex& head : index.heads) EXPECT_EQ(head.kind, HeadIndex::Kind::kDense);
  }
}

}  // namespace
}  // namespace minference::test

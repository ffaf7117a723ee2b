// The indices of the methods against a plain fp64 computation of their published rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/reference/reference.h"
#include "minference/error.h"
#include "minference/method.h"
#include "support/estimated_heads.h"
#include "support/problem.h"
#include "support/views.h"

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
    const std::vector<double> p = row_probabilities(input, params, b, h, row);
    for (std::int64_t key = 0; key <= position; ++key) {
      result.columns[key] += p[key];
      result.offsets[position - key] += p[key];
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
  EXPECT_EQ(head.rounding, RunRounding::kGranule);
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
    EXPECT_EQ(index.head(0, 1).rounding, RunRounding::kNone);
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

TEST(TriMixMInference, IsMInferenceBelowItsLayer) {
  const Problem problem = make_problem(estimated());
  const PatternFile patterns = PatternFile::parse(R"([
    {}, {"0": ["vertical_and_slash", 50, 130, 1], "1": ["stream_llm", 40, 90, 1]}
  ])",
                                                  "toy.json");
  MethodContext context;
  context.patterns = &patterns;
  context.layer = 1;
  for (const double ratio : {1, 2}) {
    const MethodOptions options{{"minference_ratio", ratio}};
    const SparseIndex expected = build("minference", problem, options, context);
    const SparseIndex actual = build("tri_mix_minference", problem, options, context);
    EXPECT_EQ(expected.head(0, 0).columns.size(), 50 * ratio);
    for (std::size_t i = 0; i < expected.heads.size(); ++i) {
      expect_same_head(actual.heads[i], expected.heads[i]);
    }
  }
}

// The keys that the sets of the rule give: whole row blocks, keys in granules. q_len a multiple of
// the row block, so that joined runs add nothing.
void expect_sets(const SparseIndex& index, const AttentionInput& input,
                 const AttentionParams& params, std::int64_t b, std::int64_t h,
                 const std::vector<std::int64_t>& columns,
                 const std::vector<std::int64_t>& offsets) {
  const std::int64_t q_len = query_length(input, b);
  const std::int64_t kv_len = key_length(input, b);
  const std::vector<std::uint8_t> mask = explicit_mask(input, params, b, h, &index);
  ASSERT_EQ(q_len % kRowBlock, 0);
  ASSERT_EQ(index.head(b, h).kind, HeadIndex::Kind::kDiagonal);
  for (std::int64_t block = 0; block < q_len; block += kRowBlock) {
    std::vector<bool> kept(kv_len, false);
    for (const std::int64_t column : columns) kept[column] = true;
    for (const std::int64_t offset : offsets) {
      for (std::int64_t row = block; row < block + kRowBlock; ++row) {
        const std::int64_t key = kv_len - q_len + row - offset;
        if (key < 0) continue;
        const std::int64_t begin = key / kRunGranule * kRunGranule;
        std::fill(kept.begin() + begin, kept.begin() + std::min(begin + kRunGranule, kv_len), true);
      }
    }
    for (std::int64_t row = block; row < block + kRowBlock; ++row) {
      for (std::int64_t key = 0; key < kv_len; ++key) {
        const bool expected = kept[key] && key <= kv_len - q_len + row;
        ASSERT_EQ(mask[row * kv_len + key] != 0, expected) << "row " << row << ", key " << key;
      }
    }
  }
}

MethodOptions sizes(double vertical, double slash) {
  return {{"vertical_size", vertical}, {"slash_size", slash}};
}

TEST(Static, LaterChunksHaveTheSetsOfTheFirst) {
  constexpr std::int64_t kFirst = 1536;
  for (const std::int64_t group : {1, 2, 8}) {
    Case c;
    c.batch = 2;
    c.q_len = 3000;
    c.extra = 0;
    c.q_heads = group;
    c.kv_heads = 1;
    c.dim = c.v_dim = 16;
    const Problem problem = make_problem(c);
    const AttentionInput whole = problem.input();
    for (std::int64_t b = 0; b < c.batch; ++b) {
      MethodState state;
      MethodContext context;
      context.state = &state;
      const Method& method = find_method("static");
      const MethodOptions options = resolve_options(method, sizes(60, 104));
      const AttentionInput first = part_of(whole, b, 0, kFirst, kFirst);
      std::vector<std::vector<std::int64_t>> columns(group);
      std::vector<std::vector<std::int64_t>> offsets(group);
      for (std::int64_t h = 0; h < group; ++h) {
        const Estimate mass = estimate(first, problem.params, 0, h);
        double column_gap = 0;
        double offset_gap = 0;
        columns[h] = heaviest(mass.columns, kForcedColumns, 60, &column_gap);
        offsets[h] = heaviest(mass.offsets, kForcedOffsets, 104, &offset_gap);
        ASSERT_GT(std::min(column_gap, offset_gap), 2e-6);
      }
      std::int64_t begin = 0;
      for (const std::int64_t rows : {kFirst, std::int64_t{64}, std::int64_t{1}, std::int64_t{63},
                                      std::int64_t{640}, std::int64_t{100}}) {
        SCOPED_TRACE(std::to_string(rows) + " rows from " + std::to_string(begin));
        const AttentionInput part = part_of(whole, b, begin, rows, begin + rows);
        const SparseIndex index = method.build_index(part, problem.params, options, context);
        for (std::int64_t h = 0; h < group; ++h) {
          if (rows % kRowBlock == 0) {
            expect_sets(index, part, problem.params, 0, h, columns[h], offsets[h]);
          }
          expect_same_head(index.head(0, h), state.index.head(0, h));
        }
        begin += rows;
      }
    }
  }
}

// Where the first chunk is no longer than the budgets, everything of it is kept: later chunks see
// its keys and as many of their own.
TEST(Static, AFirstChunkBelowTheBudgetsIsKeptWhole) {
  Case c;
  c.q_len = 1000;
  c.extra = 0;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  for (const std::int64_t first : {1, 20, 200}) {
    MethodState state;
    MethodContext context;
    context.state = &state;
    const auto chunk = [&](std::int64_t begin, std::int64_t end) {
      const Method& method = find_method("static");
      return method.build_index(part_of(problem.input(), 0, begin, end - begin, end),
                                problem.params, resolve_options(method, {}), context);
    };
    for (const HeadIndex& head : chunk(0, first).heads) {
      EXPECT_EQ(head.kind, HeadIndex::Kind::kDense);
    }
    for (const HeadIndex& head : chunk(900, 1000).heads) {
      ASSERT_EQ(head.kind, HeadIndex::Kind::kDiagonal);
      EXPECT_EQ(static_cast<std::int64_t>(head.columns.size()), first);
      EXPECT_EQ(head.columns.back(), first - 1);
      ASSERT_EQ(head.runs.size(), 1U);
      EXPECT_EQ(head.runs[0].end, first);
    }
  }
}

TEST(Static, ANewPromptIsEstimatedAnew) {
  Case c = estimated();
  c.q_len = 6000;
  c.extra = 0;
  const Problem one = make_problem(c);
  c.seed = 99;
  const Problem two = make_problem(c);
  MethodState state;
  MethodContext context;
  context.state = &state;
  const auto chunk = [&](const Problem& problem, std::int64_t begin, std::int64_t end) {
    const Method& method = find_method("static");
    return method.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                              resolve_options(method, sizes(50, 110)), context);
  };
  const auto columns = [](const SparseIndex& index) { return index.head(0, 0).columns; };
  const std::vector<std::int64_t> of_one = columns(chunk(one, 0, 2000));
  EXPECT_EQ(columns(chunk(one, 2000, 3000)), of_one);
  // As a server that reuses a prefix of 1000 tokens: part of what was estimated is replaced.
  const std::vector<std::int64_t> of_both = columns(chunk(two, 1000, 2500));
  EXPECT_NE(of_both, of_one);
  EXPECT_EQ(columns(chunk(two, 2500, 3000)), of_both);
  const std::vector<std::int64_t> of_two = columns(chunk(two, 0, 2000));
  EXPECT_NE(of_two, of_one);
  EXPECT_EQ(columns(chunk(two, 5000, 6000)), of_two);
  // A state that is empty at a later chunk begins there.
  state = {};
  const std::vector<std::int64_t> of_tail = columns(chunk(one, 3000, 4000));
  EXPECT_NE(of_tail, of_one);
  EXPECT_EQ(columns(chunk(one, 4000, 6000)), of_tail);
}

TEST(Static, IsVerticalSlashOnAPromptOfOneChunk) {
  Case c = estimated();
  c.batch = 3;
  c.lengths = Lengths::kRagged;
  c.q_len = 4000;
  c.extra = 0;
  const Problem problem = make_problem(c);
  const SparseIndex expected = build("vertical_slash", problem, sizes(50, 120));
  const SparseIndex actual = build("static", problem, sizes(50, 120));
  for (std::size_t i = 0; i < expected.heads.size(); ++i) {
    expect_same_head(actual.heads[i], expected.heads[i]);
  }
}

TEST(Static, RefusesWhatItCannotContinue) {
  const auto refusal = [](const Case& c, MethodState* state) -> std::string {
    MethodContext context;
    context.state = state;
    try {
      build("static", make_problem(c), {}, context);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  Case c;
  c.extra = 10;
  EXPECT_NE(refusal(c, nullptr).find("from position 10 of sequence 0"), std::string::npos);
  MethodState state;
  EXPECT_EQ(refusal(c, &state), "");
  c.batch = 2;
  EXPECT_NE(
      refusal(c, &state).find("the state is of 1 sequences of 4 query heads; the input has 2"),
      std::string::npos);
}

}  // namespace
}  // namespace minference::test

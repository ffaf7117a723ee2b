// mminference against a plain fp64 construction of its rule.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/reference/reference.h"
#include "minference/method.h"
#include "support/modality_oracle.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// Closer decisions than this may fall either way in f32.
constexpr double kTolerance = 2e-6;

Segment visual(std::int64_t begin, std::int64_t end, std::int64_t stride = 0) {
  return {begin, end, Modality::kVisual, stride};
}

MethodOptions options_of(const ModalityRule& rule) {
  return {{"kind", static_cast<double>(rule.kind)},
          {"vertical_size", static_cast<double>(rule.vertical)},
          {"slash_size", static_cast<double>(rule.slash)},
          {"n_init", static_cast<double>(rule.n_init)},
          {"n_local", static_cast<double>(rule.n_local)},
          {"min_stride", static_cast<double>(rule.min_stride)},
          {"max_stride", static_cast<double>(rule.max_stride)},
          {"fold_columns", static_cast<double>(rule.fold_columns)},
          {"grid_share", rule.grid_share},
          {"min_gain", rule.min_gain}};
}

SparseIndex build(const AttentionInput& input, const AttentionParams& params,
                  const ModalityRule& rule, const std::vector<std::span<const Segment>>& segments,
                  const std::vector<std::int64_t>& rows_after = {}) {
  const Method& method = find_method("mminference");
  MethodContext context;
  context.segments = segments;
  context.rows_after = rows_after;
  return method.build_index(input, params, resolve_options(method, options_of(rule)), context);
}

// Budgets small enough that no head of these short prompts is dense.
ModalityRule small(int kind) {
  ModalityRule rule;
  rule.kind = kind;
  rule.vertical = 40;
  rule.slash = 104;
  rule.n_init = 20;
  rule.n_local = 100;
  rule.max_stride = 300;
  rule.fold_columns = 60;
  return rule;
}

// A head keeps what the rule says, as (row, key) pairs. Runs are joined where that adds nothing to a
// whole row block, so the last rows of a chunk, too few for one, may keep more. A head is dense where
// the rule leaves nothing out or, in the diagonal form, little. Returns whether it is not.
bool expect_head(const SparseIndex& index, const AttentionInput& input,
                 const AttentionParams& params, std::int64_t b, std::int64_t h,
                 const ExpectedHead& expected) {
  const HeadIndex& head = index.head(b, h);
  SparseIndex rule = index;
  rule.head(b, h) = expected.head;
  const std::int64_t q_len = query_length(input, b);
  const std::int64_t kv_len = key_length(input, b);
  if (expected.head.kind == HeadIndex::Kind::kBlock) {
    rule.head(b, h).block_begin.resize((input.q.tokens() + 63) / 64 + 1,
                                       expected.head.block_begin.back());
  }
  const std::vector<std::uint8_t> wanted = explicit_mask(input, params, b, h, &rule);
  const std::vector<std::uint8_t> kept = explicit_mask(input, params, b, h, &index);
  if (head.kind == HeadIndex::Kind::kDense) {
    const auto share = static_cast<double>(std::count(wanted.begin(), wanted.end(), 1)) /
                       static_cast<double>(std::count(kept.begin(), kept.end(), 1));
    EXPECT_GE(share, expected.head.kind == HeadIndex::Kind::kBlock ? 1 : 0.85);
    return false;
  }
  EXPECT_EQ(head.kind, expected.head.kind);
  EXPECT_EQ(head.columns, expected.head.columns);
  std::int64_t wrong = 0;
  for (std::int64_t row = 0; row < q_len; ++row) {
    const bool whole = row / 64 * 64 + 64 <= q_len;
    for (std::int64_t key = 0; key < kv_len; ++key) {
      const std::int64_t i = row * kv_len + key;
      wrong += kept[i] == wanted[i] || (kept[i] > wanted[i] && !whole) ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0);
  return true;
}

struct Compared {
  std::set<int> kinds;     // of head that came up
  std::int64_t heads = 0;  // that were compared
  std::int64_t sparse = 0;
};

// Compares every head of a problem.
Compared expect_rule(const Problem& problem, const ModalityRule& rule,
                     const std::vector<std::vector<Segment>>& segments) {
  const AttentionInput input = problem.input();
  const std::vector<std::span<const Segment>> spans(segments.begin(), segments.end());
  // Segments may lie in chunks to come.
  const std::vector<std::int64_t> rows_after(segments.size(), 100000);
  const SparseIndex index = build(input, problem.params, rule, spans, rows_after);
  validate(index, input.q.batch(), input.q.heads(), input.q.tokens(), 1 << 20);
  Compared compared;
  for (std::int64_t b = 0; b < index.batch; ++b) {
    for (std::int64_t h = 0; h < index.q_heads; ++h) {
      if (query_length(input, b) == 0 || key_length(input, b) == 0) continue;
      SCOPED_TRACE("kind " + std::to_string(rule.kind) + ", sequence " + std::to_string(b) +
                   ", head " + std::to_string(h));
      const ExpectedHead expected = modality_rule(input, problem.params, b, h, segments[b], rule);
      compared.kinds.insert(expected.kind);
      if (!(expected.margin > kTolerance)) continue;
      ++compared.heads;
      compared.sparse += expect_head(index, input, problem.params, b, h, expected) ? 1 : 0;
    }
  }
  EXPECT_GT(compared.heads, 0);
  return compared;
}

Case prompt(std::int64_t q_len, std::int64_t extra) {
  Case c;
  c.q_len = q_len;
  c.extra = extra;
  c.q_heads = 2;
  c.kv_heads = 1;
  c.dim = 16;
  c.v_dim = 8;
  return c;
}

constexpr int kForcedKinds[] = {1, 2, 3, 4};

// Whole prompts and chunks: before, inside, across and behind the visual segments.
TEST(MMInference, EveryKindKeepsItsRuleInChunksOfEveryPlace) {
  const std::vector<Segment> segments = {visual(150, 1650), {1650, 1700}, visual(1710, 2460, 75)};
  for (const auto& [begin, end] : {std::pair{0, 2600},
                                   {0, 140},
                                   {100, 400},
                                   {1000, 1333},
                                   {1600, 1730},
                                   {2300, 2461},
                                   {2350, 2600},
                                   {2500, 2600},
                                   {1649, 1650}}) {
    Case c = prompt(end - begin, begin);
    c.seed = 3 + end;
    SCOPED_TRACE(describe(c));
    const Problem problem = make_problem(c);
    for (const int kind : kForcedKinds) {
      const Compared compared = expect_rule(problem, small(kind), {segments});
      // Short prompts may be dense, and in a grid rows of text are.
      EXPECT_TRUE(compared.sparse > 0 || end <= 2000 || (kind == 1 && begin == 2500)) << kind;
    }
  }
}

TEST(MMInference, SequencesOfABatchHaveTheirOwnSegments) {
  const std::vector<std::vector<Segment>> segments = {
      {visual(0, 900)}, {}, {visual(50, 60), visual(60, 400), visual(450, 500)}};
  for (const Lengths lengths : {Lengths::kRagged, Lengths::kSomeEmpty}) {
    Case c = prompt(700, 400);
    c.batch = 3;
    c.lengths = lengths;
    c.q_heads = 6;
    c.kv_heads = 2;
    const Problem problem = make_problem(c);
    for (const int kind : {0, 1, 2, 3, 4}) expect_rule(problem, small(kind), segments);
  }
}

TEST(MMInference, PagesWindowsAndSoftCaps) {
  const std::vector<Segment> segments = {visual(300, 1100)};
  for (int i = 0; i < 4; ++i) {
    Case c = prompt(i == 3 ? 1300 : 330, i == 3 ? -100 : 900);
    if (i == 0) c.page_size = 48;
    if (i == 1) c.window = 700;
    if (i == 2) c.soft_cap = 2;
    SCOPED_TRACE(describe(c));
    const Problem problem = make_problem(c);
    for (const int kind : kForcedKinds) expect_rule(problem, small(kind), {segments});
  }
}

// Keys that the queries of one modality, or both, look for: row and key share direction 1 + i.
void plant(Problem& problem, std::int64_t key, std::int64_t i, float value) {
  problem.k.set(0, key, 0, 1 + i, value);
}
void look(Problem& problem, std::int64_t begin, std::int64_t end, std::int64_t i) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t h = 0; h < 2; ++h) problem.q.set(0, row, h, 1 + i, 8);
  }
}

TEST(MMInference, AutoTakesTheGridWhereLinesHoldTheMass) {
  Problem problem = make_problem(prompt(1500, 0));
  for (std::int64_t key = 137; key < 1400; key += 97) plant(problem, key, 0, 6);
  look(problem, 0, 1500, 0);
  EXPECT_EQ(expect_rule(problem, small(0), {{visual(100, 1400)}}).kinds, std::set<int>{1});
  // The period may be given, and is obeyed: twice the true one finds half of the lines.
  const Compared given = expect_rule(problem, small(0), {{visual(100, 1400, 194)}});
  EXPECT_EQ(given.kinds.count(1), 0U);
}

TEST(MMInference, AutoRespectsABoundaryThatIsWorthIt) {
  // Text rows look for other keys than visual ones do, too many for one budget.
  Problem by_query = make_problem(prompt(2400, 0));
  for (std::int64_t n = 0; n < 10; ++n) {
    plant(by_query, 200 + 17 * n * n, 0, 6);
    plant(by_query, 205 + 17 * n * n, 1, 6);
  }
  look(by_query, 0, 2250, 0);
  look(by_query, 2250, 2400, 1);
  ModalityRule rule = small(0);
  rule.slash = 100;
  EXPECT_EQ(expect_rule(by_query, rule, {{visual(20, 2250)}}).kinds, std::set<int>{2});

  // Each row looks for text and for visual keys, which together are too many.
  Problem by_pair = make_problem(prompt(2400, 0));
  for (std::int64_t n = 0; n < 9; ++n) {
    plant(by_pair, 200 + 7 * n * n, 0, 6);
    plant(by_pair, 1500 + 7 * n * n, 0, 6);
  }
  look(by_pair, 0, 2400, 0);
  EXPECT_EQ(expect_rule(by_pair, rule, {{visual(1400, 2400)}}).kinds, std::set<int>{3});

  // Nothing is gained where everybody looks for the same few keys, which lie on no common line.
  Problem none = make_problem(prompt(2400, 0));
  for (const std::int64_t key : {1100, 1707}) plant(none, key, 0, 8);
  look(none, 0, 2400, 0);
  EXPECT_EQ(expect_rule(none, rule, {{visual(1000, 2250)}}).kinds, std::set<int>{4});
}

TEST(MMInference, WithoutVisualTokensItIsVerticalSlash) {
  const Problem problem = make_problem(prompt(300, 2700));
  const Method& vertical_slash = find_method("vertical_slash");
  const SparseIndex expected = vertical_slash.build_index(
      problem.input(), problem.params,
      resolve_options(vertical_slash, {{"vertical_size", 40}, {"slash_size", 104}}), {});
  // Text, and pictures that are still to come.
  const std::vector<Segment> text = {{0, 500}};
  const std::vector<Segment> later = {visual(3000, 4000)};
  for (const auto& segments : {std::vector<std::span<const Segment>>{}, {text}, {later}}) {
    for (const int kind : {0, 1, 2, 3, 4}) {
      const SparseIndex index =
          build(problem.input(), problem.params, small(kind), segments, {5000});
      for (std::int64_t h = 0; h < 2; ++h) {
        ASSERT_EQ(index.head(0, h).kind, HeadIndex::Kind::kDiagonal);
        EXPECT_EQ(index.head(0, h).columns, expected.head(0, h).columns);
      }
    }
  }
}

// Where a chunk's rows are of one modality, grouping them by it changes nothing.
TEST(MMInference, OneModalityOfQueriesIsOneGroup) {
  const Problem problem = make_problem(prompt(300, 2700));
  const std::vector<Segment> segments = {visual(100, 2600)};
  const SparseIndex grouped = build(problem.input(), problem.params, small(2), {segments});
  const SparseIndex together = build(problem.input(), problem.params, small(4), {segments});
  for (std::int64_t h = 0; h < 2; ++h) {
    ASSERT_EQ(grouped.head(0, h).kind, HeadIndex::Kind::kDiagonal);
    EXPECT_EQ(grouped.head(0, h).columns, together.head(0, h).columns);
  }
}

bool same_keys(const HeadIndex& a, const HeadIndex& b) {
  return a.kind == b.kind && a.columns == b.columns && a.block_begin == b.block_begin &&
         a.block_ids == b.block_ids;
}

// An estimate serves the next chunks, until their rows are of other modalities.
TEST(MMInference, ChunksShareAnEstimate) {
  const Problem problem = make_problem(prompt(2400, 0));
  const std::vector<Segment> segments = {visual(300, 2000)};
  const std::vector<std::span<const Segment>> spans = {segments};
  const Method& method = find_method("mminference");
  const auto chunk = [&](int kind, std::int64_t begin, std::int64_t end, MethodState* state) {
    MethodContext context;
    context.segments = spans;
    context.state = state;
    const std::vector<std::int64_t> rows_after = {2400 - end};
    context.rows_after = rows_after;
    return method.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                              resolve_options(method, options_of(small(kind))), context);
  };
  for (const int kind : {2, 3}) {
    MethodState state;
    chunk(kind, 0, 1000, &state);
    const SparseIndex first = chunk(kind, 1000, 1200, &state);
    // The same rows' modalities: the columns of the estimate, none of the chunk's own.
    const SparseIndex shared = chunk(kind, 1200, 1300, &state);
    EXPECT_EQ(state.kv_lens[0], 1200);
    EXPECT_TRUE(same_keys(shared.head(0, 0), first.head(0, 0))) << kind;
    // Text again, the prompt's last rows.
    EXPECT_TRUE(same_keys(chunk(kind, 2200, 2400, &state).head(0, 0),
                          chunk(kind, 2200, 2400, nullptr).head(0, 0)));
  }
  // Text begins before the estimate is old.
  MethodState state;
  chunk(2, 1000, 1900, &state);
  chunk(2, 1900, 2050, &state);
  EXPECT_EQ(state.kv_lens[0], 2050);
}

// The lines of a grid go on in the tokens that have come since they were found.
TEST(MMInference, LinesGoOnInLaterChunks) {
  const Case c = prompt(2400, 0);
  Problem problem = make_problem(c);
  for (std::int64_t t = 0; t < c.q_len; ++t) {
    for (std::int64_t h = 0; h < c.q_heads; ++h) problem.q.set(0, t, h, 0, 4);
    problem.k.set(0, t, 0, 0, t >= 100 && (t - 100) % 250 == 70 ? 30.0F : 0.0F);
  }
  const std::vector<Segment> segments = {visual(100, 2400)};
  const std::vector<std::span<const Segment>> spans = {segments};
  const Method& method = find_method("mminference");
  MethodState state;
  const auto chunk = [&](std::int64_t begin, std::int64_t end) {
    MethodContext context;
    context.segments = spans;
    context.state = &state;
    const std::vector<std::int64_t> rows_after = {2400 - end};
    context.rows_after = rows_after;
    return method.build_index(part_of(problem.input(), 0, begin, end - begin, end), problem.params,
                              resolve_options(method, options_of(small(1))), context);
  };
  chunk(640, 1920);
  ASSERT_EQ(state.lines[0].size(), 1U);
  EXPECT_EQ(state.lines[0][0].stride, 250);
  const SparseIndex later = chunk(1920, 2304);
  EXPECT_EQ(state.kv_lens[0], 1920);
  // Token 1920 is on a line, and 2170, which the earlier chunk had not seen. Of the rows of block 5,
  // from 2240 on, none is on one; their window begins at 2141.
  const HeadIndex& head = later.head(0, 0);
  ASSERT_EQ(head.kind, HeadIndex::Kind::kBlock);
  const auto keeps = [&](std::int64_t block, std::int64_t key) {
    const auto end = head.block_ids.begin() + head.block_begin[block + 1];
    return std::find(head.block_ids.begin() + head.block_begin[block], end, key / 64) != end;
  };
  EXPECT_TRUE(keeps(5, 1920));
  EXPECT_TRUE(keeps(5, 170));
  EXPECT_FALSE(keeps(5, 1850));
}

TEST(MMInference, AttentionOverTheIndexMatchesTheReference) {
  const Case c = prompt(500, 700);
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  const std::vector<Segment> segments = {visual(100, 1100)};
  const std::vector<std::span<const Segment>> spans = {segments};
  MethodContext context;
  context.segments = spans;
  for (const int kind : kForcedKinds) {
    const ModalityRule rule = small(kind);
    const SparseIndex index = build(input, problem.params, rule, spans);
    const Result expected = make_result(input, DType::kF32, Layout::kPacked);
    const Result actual = make_result(input, DType::kF32, Layout::kPacked);
    const Stats reference = attention_reference(input, problem.params, expected.output(), &index);
    const Stats stats = attention(input, problem.params, actual.output(),
                                  find_method("mminference"), options_of(rule), context);
    EXPECT_EQ(stats.kept_pairs, reference.kept_pairs);
    EXPECT_LT(stats.kept_pairs, stats.causal_pairs);
    for (std::int64_t t = 0; t < c.q_len; ++t) {
      // Values of order 4 in f32, a few hundred of them summed.
      ASSERT_NEAR(actual.out.get(0, t, 1, 3), expected.out.get(0, t, 1, 3), 1e-5) << kind;
    }
  }
}

}  // namespace
}  // namespace minference::test

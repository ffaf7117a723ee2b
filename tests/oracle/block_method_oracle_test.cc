// The indices of the block methods against plain fp64 constructions of their rules.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

#include "attention/reference/reference.h"
#include "minference/method.h"
#include "support/block_oracle.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// Closer decisions than this may fall either way in f32.
constexpr double kTolerance = 2e-6;

// Makes choose_isa() choose one level.
class ForcedLevel {
 public:
  explicit ForcedLevel(IsaLevel level) { setenv("MINFERENCE_FORCE_ISA", isa_name(level), 1); }
  ~ForcedLevel() { unsetenv("MINFERENCE_FORCE_ISA"); }
  ForcedLevel(const ForcedLevel&) = delete;
  ForcedLevel& operator=(const ForcedLevel&) = delete;
};

SparseIndex build(const char* method, const Problem& problem, const MethodOptions& options,
                  const MethodContext& context = {}) {
  const Method& found = find_method(method);
  return found.build_index(problem.input(), problem.params, resolve_options(found, options),
                           context);
}

// Chunks aligned and not, short and long, ragged, paged, windowed.
std::vector<Case> cases() {
  Case c;
  c.dim = 16;
  c.v_dim = 8;
  c.q_len = 640;
  c.extra = 0;
  std::vector<Case> result = {c};
  const auto add = [&](auto&& change) {
    Case changed = c;
    change(changed);
    changed.seed = 10 + result.size();
    result.push_back(changed);
  };
  add([](Case& x) { x.q_len = 400, x.extra = 333; });
  add([](Case& x) { x.q_len = 1, x.extra = 900; });
  add([](Case& x) { x.q_len = 70, x.extra = 1000; });
  add([](Case& x) { x.q_len = 517, x.extra = 128; });
  add([](Case& x) { x.batch = 3, x.lengths = Lengths::kRagged, x.q_len = 700, x.extra = 211; });
  add([](Case& x) { x.batch = 2, x.lengths = Lengths::kRagged, x.page_size = 48, x.extra = 77; });
  add([](Case& x) { x.window = 300, x.extra = 91; });
  add([](Case& x) { x.q_len = 500, x.extra = -130; });
  add([](Case& x) { x.soft_cap = 2, x.scale = 0.4F; });
  add([](Case& x) { x.batch = 3, x.lengths = Lengths::kSomeEmpty; });
  add([](Case& x) { x.q_heads = 5, x.kv_heads = 1, x.layout = Layout::kHeadMajor, x.dim = 24; });
  return result;
}

// Rows and keys of 40 consecutive positions share one of a few directions, and some keys are heavy.
// All values are small whole numbers: products are exact at every level and in every type.
void fill_structured(const Case& c, Problem& problem) {
  std::mt19937 random(static_cast<std::uint32_t>(c.seed));
  const auto value = [&](std::int64_t position, std::int64_t h, std::int64_t d,
                         std::int64_t heavy) {
    const std::int64_t topic = position / 40 * 7 % 5 + h;
    const std::int64_t shared = (topic * 31 + d * 17) % 3 - 1;
    return static_cast<float>(shared + (d == 0 ? heavy : 0) + static_cast<int>(random() % 3) - 1);
  };
  const AttentionInput input = problem.input();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t q_len = query_length(input, b);
    const std::int64_t kv_len = key_length(input, b);
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      for (std::int64_t row = 0; row < q_len; ++row) {
        for (std::int64_t d = 0; d < c.dim; ++d) {
          problem.q.set(b, row, h, d,
                        value(std::max<std::int64_t>(kv_len - q_len + row, 0), h, d, 1));
        }
      }
    }
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      for (std::int64_t key = 0; key < kv_len; ++key) {
        std::int64_t page = b;
        std::int64_t token = key;
        if (c.page_size > 0) {
          page = problem.block_table[b * problem.pages_per_sequence + key / c.page_size];
          token = key % c.page_size;
        }
        const std::int64_t heavy = key < 3 || key % 97 == 50 ? 12 : 0;
        for (std::int64_t d = 0; d < c.dim; ++d)
          problem.k.set(page, token, h, d, value(key, h, d, heavy));
      }
    }
  }
}

// Compares every head of every sequence with `rule` on random f32 tensors and, in every type, on
// structured whole numbers, at every level.
using HeadRule = std::function<ExpectedBlocks(const AttentionInput&, const AttentionParams&,
                                              std::int64_t b, std::int64_t h)>;

void expect_rule(const char* method, const MethodOptions& options, const HeadRule& rule) {
  double compared = 0;
  std::int64_t heads = 0;
  for (Case c : cases()) {
    for (const bool structured : {false, true}) {
      if (structured) {
        c.q_dtype = c.seed % 2 == 0 ? DType::kBF16 : DType::kF32;
        c.kv_dtype = c.seed % 3 == 0 ? DType::kF16 : DType::kBF16;
      }
      Problem problem = make_problem(c);
      if (structured) fill_structured(c, problem);
      const AttentionInput input = problem.input();
      std::vector<ExpectedBlocks> expected;
      for (std::int64_t i = 0; i < c.batch * c.q_heads; ++i) {
        expected.push_back(rule(input, problem.params, i / c.q_heads, i % c.q_heads));
      }
      for (const IsaLevel level : available_isa_levels()) {
        SCOPED_TRACE(describe(c) + ", " + isa_name(level));
        const ForcedLevel forced(level);
        const SparseIndex index = build(method, problem, options);
        validate(index, c.batch, c.q_heads, c.q_len, 1 << 20);
        for (std::int64_t i = 0; i < c.batch * c.q_heads; ++i) {
          SCOPED_TRACE("head " + std::to_string(i));
          compared += expect_kept(index.heads[i], expected[i], input, problem.params, i / c.q_heads,
                                  kTolerance);
          ++heads;
        }
      }
    }
  }
  EXPECT_GT(compared / static_cast<double>(heads), 0.95) << "too little was compared";
}

TEST(BlockSparse, TakesTheBlocksWhoseMeansMatch) {
  for (const std::int64_t top_k : {1, 3, 6}) {
    SCOPED_TRACE("top_k " + std::to_string(top_k));
    expect_rule("block_sparse", {{"top_k", static_cast<double>(top_k)}},
                [&](const auto& input, const auto& params, std::int64_t b, std::int64_t h) {
                  return block_sparse_rule(input, params, b, h, top_k);
                });
  }
}

// Whole blocks of whole numbers: even ties are exact, and the earlier blocks win them.
TEST(BlockSparse, TiesGoToEarlierBlocks) {
  Case c = cases()[0];
  c.extra = 1280;
  Problem problem = make_problem(c);
  for (std::int64_t t = 0; t < c.q_len + c.extra; ++t) {
    for (std::int64_t d = 0; d < c.dim; ++d) {
      for (std::int64_t h = 0; h < c.q_heads && t < c.q_len; ++h) problem.q.set(0, t, h, d, 1);
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        problem.k.set(0, t, h, d, static_cast<float>(t / 64 % 3));
      }
    }
  }
  const AttentionInput input = problem.input();
  for (const std::int64_t top_k : {2, 5, 9, 20}) {
    const SparseIndex index =
        build("block_sparse", problem, {{"top_k", static_cast<double>(top_k)}});
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      EXPECT_EQ(expect_kept(index.head(0, h), block_sparse_rule(input, problem.params, 0, h, top_k),
                            input, problem.params, 0, -1),
                1);
    }
  }
}

TEST(BlockSparse, IsWhatPatternFilesMeanByIt) {
  Case c = cases()[0];
  c.q_len = 200;
  c.extra = 11800;
  const Problem problem = make_problem(c);
  const PatternFile patterns = PatternFile::parse(
      R"([{"0": ["vertical_and_slash", 50, 130, 1], "1": ["block_sparse", 1, 2, 1],
           "2": ["stream_llm", 40, 90, 1], "3": ["block_sparse", 5000, 5000, 1]}])",
      "toy.json");
  MethodContext context;
  context.patterns = &patterns;
  const SparseIndex index = build("minference", problem, {{"minference_ratio", 0.01}}, context);
  const SparseIndex expected = build("block_sparse", problem, {});
  for (const std::int64_t h : {1, 3}) {
    ASSERT_EQ(index.head(0, h).kind, HeadIndex::Kind::kBlock);
    EXPECT_EQ(index.head(0, h).block_ids, expected.head(0, h).block_ids);
    EXPECT_EQ(index.head(0, h).block_begin, expected.head(0, h).block_begin);
    EXPECT_EQ(index.head(0, h).block_begin[1], 100);
  }
  EXPECT_EQ(index.head(0, 0).kind, HeadIndex::Kind::kDiagonal);
  EXPECT_EQ(index.head(0, 2).kind, HeadIndex::Kind::kDiagonal);
}

TEST(XAttention, KeepsTheShareOfEachRowBlock) {
  for (const XAttentionRule& rule : {XAttentionRule{},
                                     {64, 8, 0.5, 1},
                                     {128, 16, 0.7, 0.5},
                                     {192, 8, 0.95, 2},
                                     {64, 64, 0.8, 1},
                                     {128, 1, 0.6, 1}}) {
    SCOPED_TRACE("block " + std::to_string(rule.block_size) + ", stride " +
                 std::to_string(rule.stride));
    expect_rule("xattention",
                {{"block_size", static_cast<double>(rule.block_size)},
                 {"stride", static_cast<double>(rule.stride)},
                 {"threshold", rule.threshold},
                 {"norm", rule.norm}},
                [&](const auto& input, const auto& params, std::int64_t b, std::int64_t h) {
                  return xattention_rule(input, params, b, h, rule);
                });
  }
}

TEST(XAttention, ThresholdsZeroAndOneAreTheForcedBlocksAndEverything) {
  const Problem problem = make_problem(cases()[1]);
  const AttentionInput input = problem.input();
  const SparseIndex nothing = build("xattention", problem, {{"threshold", 0}});
  XAttentionRule rule;
  rule.threshold = 0;
  EXPECT_EQ(expect_kept(nothing.head(0, 0), xattention_rule(input, problem.params, 0, 0, rule),
                        input, problem.params, 0, kTolerance),
            1);
  for (const HeadIndex& head : build("xattention", problem, {{"threshold", 1}}).heads) {
    EXPECT_EQ(head.kind, HeadIndex::Kind::kDense);
  }
}

// Shares that no whole number of row blocks makes up: an even map fills its first ones completely.
TEST(FlexPrefill, ColumnsDiagonalsAndTheMapHoldGamma) {
  for (const FlexPrefillRule& rule : {FlexPrefillRule{},
                                      {64, 0.53, 0, 0, 0},
                                      {64, 0.63, 1, 0, 0},
                                      {64, 0.73, 0.1, 150, 300},
                                      {128, 0.83, 1, 200, 0},
                                      {192, 0.3, 0, 0, 200},
                                      {64, 0, 0, 100, 100}}) {
    SCOPED_TRACE("block " + std::to_string(rule.block_size) + ", gamma " +
                 std::to_string(rule.gamma) + ", tau " + std::to_string(rule.tau));
    expect_rule("flexprefill",
                {{"block_size", static_cast<double>(rule.block_size)},
                 {"gamma", rule.gamma},
                 {"tau", rule.tau},
                 {"min_budget", static_cast<double>(rule.min_budget)},
                 {"max_budget", static_cast<double>(rule.max_budget)}},
                [&](const auto& input, const auto& params, std::int64_t b, std::int64_t h) {
                  return flexprefill_rule(input, params, b, h, rule);
                });
  }
}

TEST(InfLlm, KeepsTheFirstTheNearestAndTheBestOfThePast) {
  for (const InfLlmRule& rule : {InfLlmRule{0, 1, 1, 4, 64, 128},
                                 {100, 100, 2, 4, 128, 512},
                                 {64, 65, 3, 1, 64, 192},
                                 {1, 200, 1, 1000, 192, 256}}) {
    SCOPED_TRACE("block " + std::to_string(rule.block_size) + ", topk " +
                 std::to_string(rule.topk));
    expect_rule("inf_llm",
                {{"n_init", static_cast<double>(rule.n_init)},
                 {"n_local", static_cast<double>(rule.n_local)},
                 {"topk", static_cast<double>(rule.topk)},
                 {"repr_topk", static_cast<double>(rule.repr_topk)},
                 {"block_size", static_cast<double>(rule.block_size)},
                 {"exc_block_size", static_cast<double>(rule.exc_block_size)}},
                [&](const auto& input, const auto& params, std::int64_t b, std::int64_t h) {
                  return inf_llm_rule(input, params, b, h, rule);
                });
  }
}

// Chunks of whole execution blocks keep what the whole prompt does.
TEST(InfLlm, ChunksKeepWhatTheWholePromptKeeps) {
  Case c = cases()[0];
  c.q_len = 1100;
  const Problem problem = make_problem(c);
  const Method& method = find_method("inf_llm");
  const MethodOptions options = resolve_options(
      method, {{"n_init", 64}, {"n_local", 150}, {"topk", 2}, {"exc_block_size", 128}});
  const SparseIndex whole = build("inf_llm", problem, options);
  for (std::int64_t begin = 0; begin < c.q_len; begin += 256) {
    const std::int64_t rows = std::min<std::int64_t>(256, c.q_len - begin);
    const AttentionInput part = part_of(problem.input(), 0, begin, rows, begin + rows);
    const SparseIndex index = method.build_index(part, problem.params, options, {});
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      const std::vector<std::uint8_t> expected =
          explicit_mask(problem.input(), problem.params, 0, h, &whole);
      const std::vector<std::uint8_t> kept = explicit_mask(part, problem.params, 0, h, &index);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t key = 0; key < begin + rows; ++key) {
          ASSERT_EQ(kept[row * (begin + rows) + key], expected[(begin + row) * c.q_len + key])
              << "head " << h << ", row " << begin + row << ", key " << key;
        }
      }
    }
  }
}

TEST(BlockMethods, AttentionOverTheIndexMatchesTheReference) {
  for (const auto& [method, options] :
       {std::pair<const char*, MethodOptions>{"block_sparse", {{"top_k", 4}}},
        {"flexprefill", {{"gamma", 0.5}, {"block_size", 64}}},
        {"flexprefill", {{"gamma", 0.5}, {"tau", 1}}},
        {"xattention", {{"threshold", 0.5}}},
        {"inf_llm", {{"n_init", 64}, {"n_local", 64}, {"topk", 1}, {"exc_block_size", 64}}}}) {
    Case c = cases()[5];
    const Problem problem = make_problem(c);
    const AttentionInput input = problem.input();
    const SparseIndex index = build(method, problem, options);
    const Result expected = make_result(input, DType::kF32, Layout::kPacked);
    const Result actual = make_result(input, DType::kF32, Layout::kPacked);
    const Stats reference = attention_reference(input, problem.params, expected.output(), &index);
    const Stats stats =
        attention(input, problem.params, actual.output(), find_method(method), options, {});
    EXPECT_EQ(stats.kept_pairs, reference.kept_pairs) << method;
    EXPECT_LT(stats.kept_pairs, stats.causal_pairs) << method;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t t = 0; t < query_length(input, b); ++t) {
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          for (std::int64_t d = 0; d < c.v_dim; ++d) {
            // Values of order 4 in f32, a few hundred of them summed.
            ASSERT_NEAR(actual.out.get(b, t, h, d), expected.out.get(b, t, h, d), 1e-5) << method;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

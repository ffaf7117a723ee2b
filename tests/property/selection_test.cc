// What the methods select: planted keys are found, budgets are monotone, small inputs are dense.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "minference/guard.h"
#include "minference/method.h"
#include "support/problem.h"
#include "support/selection.h"
#include "support/views.h"

namespace minference::test {
namespace {

SparseIndex build(const char* method, const Problem& problem, const MethodOptions& options,
                  MethodState* state = nullptr) {
  const Method& found = find_method(method);
  MethodContext context;
  context.layer = 20;  // a triangle in the methods that differ by layer
  context.state = state;
  return found.build_index(problem.input(), problem.params, resolve_options(found, options),
                           context);
}

bool has_column(const HeadIndex& head, std::int64_t key) {
  return head.kind == HeadIndex::Kind::kDense ||
         std::binary_search(head.columns.begin(), head.columns.end(), key);
}

TEST(PlantedKey, IsSelectedByEveryHeadOfItsGroup) {
  for (const auto& [q_heads, kv_heads] : kGroupedHeads) {
    for (const std::int64_t page_size : {0, 16}) {
      Case c;
      c.q_len = 1200;
      c.extra = 300;
      c.q_heads = q_heads;
      c.kv_heads = kv_heads;
      c.dim = c.v_dim = 16;
      c.page_size = page_size;
      SCOPED_TRACE(describe(c));
      Problem problem = make_problem(c);
      // Seen by every row, behind the sinks, further back than the forced offsets; one a KV head.
      const auto planted = [](std::int64_t kv_head) { return 150 + 40 * kv_head; };
      plant_keys(c, planted, 30, problem);
      const MethodOptions budgets{{"vertical_size", 40}, {"slash_size", 110}};
      for (const auto& [method, options] :
           {std::pair{"vertical_slash", budgets},
            {"static", budgets},
            {"auto", MethodOptions{{"min_keys", 0}, {"max_cost", 1000}}}}) {
        MethodState state;
        const SparseIndex index = build(method, problem, options, &state);
        for (std::int64_t h = 0; h < q_heads; ++h) {
          EXPECT_EQ(index.head(0, h).kind, HeadIndex::Kind::kDiagonal);
          EXPECT_TRUE(has_column(index.head(0, h), planted(h / (q_heads / kv_heads))))
              << method << ", head " << h;
        }
        for (const double recall : mass_recall(problem.input(), problem.params, index, 16)) {
          EXPECT_GT(recall, 0.99) << method;
        }
      }
    }
  }
}

TEST(Budgets, MoreNeverKeepsLess) {
  Case c;
  c.q_len = 700;
  c.extra = 500;
  c.q_heads = 3;
  c.kv_heads = 1;
  c.dim = c.v_dim = 32;
  const Problem problem = make_problem(c);
  std::vector<double> previous(c.q_heads, 0.0);
  std::int64_t previous_pairs = 0;
  for (const double budget : {0, 50, 100, 150, 200, 300, 500, 800, 1100, 1200, 5000}) {
    const SparseIndex index =
        build("vertical_slash", problem, {{"vertical_size", budget}, {"slash_size", budget}});
    const std::vector<double> recall = mass_recall(problem.input(), problem.params, index, 32);
    const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
    const Stats stats = attention(problem.input(), problem.params, result.output(), &index);
    EXPECT_GE(stats.kept_pairs, previous_pairs) << budget;
    previous_pairs = stats.kept_pairs;
    expect_no_less(recall, previous, "budget " + std::to_string(budget));
  }
  EXPECT_NEAR(previous[0], 1, 1e-6);
}

// Each option of the methods without an estimate alone, from nothing to more than everything. A
// stride keeps what its multiples keep; a window of even length begins the thinned one on the same
// offsets.
TEST(Budgets, MoreOfOneOptionNeverKeepsLess) {
  Case c;
  c.q_len = 300;
  c.extra = 200;
  c.q_heads = 3;
  c.kv_heads = 1;
  c.dim = c.v_dim = 32;
  const Problem problem = make_problem(c);
  const MethodOptions triangle{{"n_init", 10}, {"n_local", 20}, {"n_last", 10}};
  const MethodOptions dilated1{{"n_init", 10}, {"n_local", 100}, {"stride", 2}};
  const MethodOptions dilated2{{"n_init", 10}, {"n_local", 20}, {"n_dilated", 100}, {"stride", 2}};
  const std::vector<double> sizes{0, 2, 20, 64, 100, 130, 300, 498, 500, 5000};
  const std::vector<double> windows{2, 20, 64, 100, 130, 300, 498, 500, 5000};
  const std::vector<double> strides{64, 32, 8, 4, 2, 1};
  for (const auto& [method, base, option, values] :
       {std::tuple{"a_shape", MethodOptions{{"n_init", 10}, {"n_local", 20}}, "n_init", sizes},
        {"a_shape", MethodOptions{{"n_init", 10}, {"n_local", 20}}, "n_local", windows},
        {"tri_shape", triangle, "n_init", sizes},
        {"tri_shape", triangle, "n_local", windows},
        {"tri_shape", triangle, "n_last", sizes},
        {"tri_mix", triangle, "n_last", sizes},
        {"tri_mix_minference", triangle, "n_local", windows},
        {"dilated1", dilated1, "n_init", sizes},
        {"dilated1", dilated1, "n_local", windows},
        {"dilated1", dilated1, "stride", strides},
        {"dilated2", dilated2, "n_init", sizes},
        {"dilated2", dilated2, "n_local", windows},
        {"dilated2", dilated2, "n_dilated", sizes},
        {"dilated2", dilated2, "stride", strides}}) {
    std::vector<double> previous(c.q_heads, 0.0);
    std::int64_t previous_pairs = 0;
    for (const double value : values) {
      MethodOptions options = base;
      options[option] = value;
      const std::string what = std::string(method) + ", " + option + " " + std::to_string(value);
      const SparseIndex index = build(method, problem, options);
      const std::vector<double> recall = mass_recall(problem.input(), problem.params, index, 32);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      const Stats stats = attention(problem.input(), problem.params, result.output(), &index);
      EXPECT_GE(stats.kept_pairs, previous_pairs) << what;
      previous_pairs = stats.kept_pairs;
      expect_no_less(recall, previous, what);
    }
  }
}

TEST(Budgets, ForcedKeysSurviveTheSmallestBudget) {
  Case c;
  c.q_len = 400;
  c.extra = 400;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  for (const double budget : {0, 1, 29, 30, 99}) {
    const SparseIndex index =
        build("vertical_slash", problem, {{"vertical_size", budget}, {"slash_size", budget}});
    for (const HeadIndex& head : index.heads) {
      ASSERT_EQ(head.kind, HeadIndex::Kind::kDiagonal);
      for (std::int64_t key = 0; key < 30; ++key) EXPECT_TRUE(has_column(head, key)) << key;
      for (std::int64_t offset = 0; offset < 100; ++offset) {
        EXPECT_TRUE(std::any_of(head.runs.begin(), head.runs.end(), [=](const OffsetRun& run) {
          return run.contains(offset);
        })) << offset;
      }
      const auto columns = static_cast<double>(head.columns.size());
      EXPECT_EQ(columns, std::max(30.0, budget));
    }
  }
}

TEST(Budgets, LargerThanTheTextAreDense) {
  for (const char* method : {"vertical_slash", "static", "a_shape", "tri_shape", "dilated1",
                             "dilated2", "tri_mix", "tri_mix_minference", "minference", "auto"}) {
    for (std::int64_t length = 1; length <= 70; ++length) {
      Case c;
      c.q_len = length;
      c.extra = 0;
      c.dim = c.v_dim = 8;
      const Problem problem = make_problem(c);
      const AttentionInput input = problem.input();
      const Result dense = make_result(input, DType::kF32, Layout::kPacked);
      const Result sparse = make_result(input, DType::kF32, Layout::kPacked);
      attention(input, problem.params, dense.output());
      const Stats stats =
          attention(input, problem.params, sparse.output(), find_method(method), {}, {});
      EXPECT_EQ(stats.kept_pairs, stats.causal_pairs) << method << ", " << length << " tokens";
      EXPECT_EQ(first_difference(dense.out.values(), sparse.out.values()), -1)
          << method << ", " << length << " tokens";
    }
  }
}

// An index is only as good as its rows are covered: no row of any chunk may end up without a key.
TEST(Budgets, EveryRowKeepsItsOwnKey) {
  for (const std::int64_t extra : {0, 1, 200}) {
    Case c;
    c.q_len = 300;
    c.extra = extra;
    c.dim = c.v_dim = 16;
    const Problem problem = make_problem(c);
    const MethodOptions window{{"n_init", 0}, {"n_local", 1}};
    const MethodOptions triangle{{"n_init", 0}, {"n_local", 1}, {"n_last", 0}};
    for (const auto& [method, options] :
         {std::pair{"vertical_slash", MethodOptions{{"vertical_size", 0}, {"slash_size", 0}}},
          {"static", MethodOptions{{"vertical_size", 0}, {"slash_size", 0}}},
          {"auto", MethodOptions{{"min_keys", 0}, {"max_cost", 1000}, {"coverage", 0}}},
          {"a_shape", window},
          {"dilated1", window},
          {"dilated2", window},
          {"tri_shape", triangle},
          {"tri_mix", triangle},
          {"tri_mix_minference", triangle}}) {
      MethodState state;
      const SparseIndex index = build(method, problem, options, &state);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      attention(problem.input(), problem.params, result.output(), &index);
      for (const float lse : result.lse.values()) EXPECT_TRUE(std::isfinite(lse)) << method;
    }
  }
}

}  // namespace
}  // namespace minference::test

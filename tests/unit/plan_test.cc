// Plans: the index of one call, run again over the same and over other tensors.
#include "minference/plan.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "minference/error.h"
#include "support/problem.h"

namespace minference::test {
namespace {

Case chunk() {
  Case c;
  c.batch = 2;
  c.q_len = 200;
  c.extra = 300;
  c.q_heads = 6;
  return c;
}

const MethodOptions kSmallBudgets = {{"vertical_size", 30}, {"slash_size", 100}};

std::vector<float> attend(const Problem& problem) {
  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  attention(problem.input(), problem.params, result.output(), find_method("vertical_slash"),
            kSmallBudgets, {});
  return result.out.values();
}

std::vector<float> run(const AttentionPlan& plan, const Problem& problem) {
  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  execute(plan, problem.input(), result.output());
  return result.out.values();
}

AttentionPlan plan_of(const Problem& problem, const MethodContext& context = {}) {
  return plan_attention(problem.input(), problem.params, find_method("vertical_slash"),
                        kSmallBudgets, context);
}

TEST(Plan, RunsAsOftenAsWanted) {
  const Problem problem = make_problem(chunk());
  const AttentionPlan plan = plan_of(problem);
  EXPECT_EQ(plan.stats().method, "vertical_slash");
  EXPECT_GT(plan.stats().index_seconds, 0);
  EXPECT_EQ(plan.stats().kernel_seconds, 0);
  const std::vector<float> expected = attend(problem);
  EXPECT_EQ(run(plan, problem), expected);
  EXPECT_EQ(run(plan, problem), expected);

  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  const Stats stats = execute(plan, problem.input(), result.output());
  EXPECT_EQ(stats.method, "vertical_slash");
  EXPECT_EQ(stats.index_seconds, 0);
  EXPECT_LT(stats.kept_pairs, stats.causal_pairs);
}

// Other values: the index stays, so the result is linear in them. Other queries: those of the plan
// decided which keys they see.
TEST(Plan, TakesOtherTensorsOfItsSizes) {
  const Problem problem = make_problem(chunk());
  const AttentionPlan plan = plan_of(problem);
  Problem other = make_problem(chunk());
  Case wide = chunk();
  wide.v_dim = 32;
  wide.seed = 7;
  other.v = make_problem(wide).v;
  EXPECT_EQ(run(plan, other), attend(other));

  SparseIndex index;
  MethodContext context;
  context.on_index = [&](const SparseIndex& shown) { index = shown; };
  const AttentionPlan shown = plan_of(problem, context);
  const Problem foreign = make_problem(wide);
  const Result expected = make_result(foreign.input(), DType::kF32, Layout::kPacked);
  attention(foreign.input(), foreign.params, expected.output(), &index);
  EXPECT_EQ(run(shown, foreign), expected.out.values());
}

TEST(Plan, GuardBelongsToThePlan) {
  const Problem problem = make_problem(chunk());
  MethodContext context;
  context.guard = {GuardMode::kEnforce, 4, 1.0};
  const AttentionPlan plan = plan_of(problem, context);
  EXPECT_EQ(plan.stats().recall_count, 12);
  EXPECT_EQ(plan.stats().fallbacks.size(), 1U);
  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  const Stats stats = execute(plan, problem.input(), result.output());
  EXPECT_EQ(stats.kept_pairs, stats.causal_pairs);
  EXPECT_EQ(stats.recall_count, 0);
}

TEST(Plan, MaskedCallsAreExact) {
  Case c = chunk();
  c.mask = MaskKind::kCausal;
  const Problem problem = make_problem(c);
  const AttentionPlan plan = plan_of(problem);
  EXPECT_EQ(plan.stats().fallbacks.count("mask is not a causal prefix"), 1U);
  const Problem plain = make_problem(chunk());
  EXPECT_THROW(run(plan, plain), InvalidArgument);
  EXPECT_THROW(run(plan_of(plain), problem), InvalidArgument);
}

TEST(Plan, OtherSizesAreRefusedByName) {
  const AttentionPlan plan = plan_of(make_problem(chunk()));
  const auto refused = [&](auto&& change) {
    Case c = chunk();
    change(c);
    try {
      run(plan, make_problem(c));
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(refused([](Case& c) { c.batch = 3; }), "batch is 3; legal: that of the plan, 2");
  EXPECT_EQ(refused([](Case& c) { c.q_len = 100; }),
            "q_tokens is 100; legal: that of the plan, 200");
  EXPECT_EQ(refused([](Case& c) { c.q_heads = 8; }), "q_heads is 8; legal: that of the plan, 6");
  EXPECT_EQ(refused([](Case& c) { c.kv_heads = 3; }), "kv_heads is 3; legal: that of the plan, 2");
  EXPECT_EQ(refused([](Case& c) { c.extra = 299; }),
            "kv_len of sequence 0 is 499; legal: that of the plan, 500");
  EXPECT_EQ(refused([](Case& c) {
              c.lengths = Lengths::kRagged;
              c.extra = 600;  // half of it for the first of two
            }),
            "q_len of sequence 1 is 80; legal: that of the plan, 200");
}

TEST(Plan, RefusesWhatAttentionRefuses) {
  const Problem problem = make_problem(chunk());
  AttentionInput bad = problem.input();
  bad.k.shape[3] = 32;
  EXPECT_THROW(plan_attention(bad, {}, find_method("a_shape"), {}, {}), InvalidArgument);
  EXPECT_THROW(plan_attention(problem.input(), {}, find_method("a_shape"), {{"n_int", 1}}, {}),
               InvalidArgument);
  AttentionPlan plan = plan_of(problem);
  EXPECT_THROW(execute(plan, problem.input(), {}), InvalidArgument);
  const AttentionPlan moved = std::move(plan);
  EXPECT_THROW(run(plan, problem), InvalidArgument);  // NOLINT(bugprone-use-after-move)
  EXPECT_THROW(plan.stats(), InvalidArgument);
  run(moved, problem);
}

}  // namespace
}  // namespace minference::test

// The public entry: which level it picks, what it reports, what it leaves to its caller.
#include "minference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "attention/reference/reference.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

Stats run(const Case& c, Precision precision) {
  Problem problem = make_problem(c);
  problem.params.precision = precision;
  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  return attention(problem.input(), problem.params, result.output(), problem.index());
}

TEST(Attention, PrecisionPicksTheLevel) {
  Case f32;
  Case half_q;
  half_q.q_dtype = DType::kF16;
  Case half_kv;
  half_kv.kv_dtype = DType::kBF16;
  EXPECT_EQ(run(f32, Precision::kAuto).isa, choose_isa(false));
  EXPECT_EQ(run(f32, Precision::kBF16).isa, choose_isa(true));
  for (const Case& half : {half_q, half_kv}) {
    EXPECT_EQ(run(half, Precision::kAuto).isa, choose_isa(true));
    EXPECT_EQ(run(half, Precision::kF32).isa, choose_isa(false));
  }
}

TEST(Attention, ReportsPairsAndTime) {
  Case c;
  c.q_len = 100;
  c.extra = 0;
  const Stats dense = run(c, Precision::kAuto);
  EXPECT_EQ(dense.method, "dense");
  EXPECT_EQ(dense.causal_pairs, 4 * 100 * 101 / 2);
  EXPECT_EQ(dense.kept_pairs, dense.causal_pairs);
  EXPECT_GT(dense.kernel_seconds, 0);
  EXPECT_TRUE(dense.fallbacks.empty());
  c.pattern = Pattern::kAShape;
  c.budget = Budget::kOne;  // five columns and the diagonal
  const Stats sparse = run(c, Precision::kAuto);
  EXPECT_EQ(sparse.kept_pairs, 4 * (1 + 2 + 3 + 4 + 5 + 95 * 6));
  EXPECT_EQ(sparse.causal_pairs, dense.causal_pairs);
}

TEST(Attention, EmptyCallsDoNothing) {
  for (const bool no_rows : {true, false}) {
    Case c;
    c.q_len = no_rows ? 0 : 3;
    c.extra = no_rows ? 10 : -3;
    const Problem problem = make_problem(c);
    const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
    const Stats stats = attention(problem.input(), problem.params, result.output());
    EXPECT_EQ(stats.causal_pairs, 0);
    EXPECT_EQ(stats.kept_fraction(), 1.0);
  }
  Case c;
  Problem problem = make_problem(c);
  AttentionInput input = problem.input();
  input.q.shape[0] = input.k.shape[0] = input.v.shape[0] = 0;  // no sequence at all
  AttentionOutput output;
  output.out = TensorView::contiguous(nullptr, DType::kF32, {0, c.q_len, c.q_heads, c.v_dim});
  EXPECT_EQ(attention(input, problem.params, output).causal_pairs, 0);
}

TEST(Attention, DecodeStepsEqualTheLastRowOfPrefill) {
  Case c;
  c.q_len = 130;
  c.extra = 0;
  const Problem problem = make_problem(c);
  const Result whole = make_result(problem.input(), DType::kF32, Layout::kPacked);
  attention(problem.input(), problem.params, whole.output());
  for (const std::int64_t row : {0, 1, 63, 64, 129}) {
    const AttentionInput step = part_of(problem.input(), 0, row, 1, row + 1);
    const Result result = make_result(step, DType::kF32, Layout::kPacked);
    attention(step, problem.params, result.output());
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      for (std::int64_t d = 0; d < c.v_dim; ++d) {
        ASSERT_NEAR(result.out.get(0, 0, h, d), whole.out.get(0, row, h, d), 0x1p-20);
      }
    }
  }
}

// A NaN must reach the rows that see it, or nobody would notice, and must not travel to other rows
// or heads.
TEST(Attention, NaNStaysWithTheRowsThatSeeIt) {
  Case c;
  c.q_len = 100;
  c.extra = 0;
  Problem problem = make_problem(c);
  problem.v.set(0, 99, 0, 0, std::numeric_limits<float>::quiet_NaN());
  const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  attention(problem.input(), problem.params, result.output());
  EXPECT_TRUE(std::isnan(result.out.get(0, 99, 0, 0)));
  for (std::int64_t t = 0; t < c.q_len; ++t) {
    EXPECT_TRUE(std::isfinite(result.out.get(0, t, 2, 0))) << t;  // of the other KV head
    if (t < 99) {
      EXPECT_TRUE(std::isfinite(result.out.get(0, t, 0, 0))) << t;
    }
  }
}

TEST(Attention, ConcurrentCallsDoNotDisturbEachOther) {
  Case c;
  c.q_len = 200;
  c.pattern = Pattern::kMixed;
  c.q_heads = 6;
  c.dense_last_rows = 3;
  const Problem problem = make_problem(c);
  AttentionParams params = problem.params;
  params.threads = 2;
  const auto once = [&] {
    const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
    attention(problem.input(), params, result.output(), problem.index());
    return result.out.values();
  };
  const std::vector<float> expected = once();
  std::vector<std::thread> callers;
  std::vector<std::int64_t> differences(4, -1);
  for (std::size_t i = 0; i < differences.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        differences[i] = std::max(differences[i], first_difference(once(), expected));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(differences, std::vector<std::int64_t>(4, -1));
}

}  // namespace
}  // namespace minference::test

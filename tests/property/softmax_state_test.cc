// The algebra of attention: partial results merge by their LSE, and empty ones count for nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/executor.h"
#include "support/problem.h"

namespace minference::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Masks for one sequence of `rows` x `keys`: the keys with (key / width) % 2 == side.
std::vector<std::uint64_t> stripes(std::int64_t rows, std::int64_t keys, std::int64_t width,
                                   std::int64_t side) {
  const std::int64_t row_words = (keys + 63) / 64;
  std::vector<std::uint64_t> words(rows * row_words, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t key = 0; key <= keys - rows + row; ++key) {
      if (key / width % 2 == side) words[row * row_words + key / 64] |= 1ULL << (key % 64);
    }
  }
  return words;
}

TEST(PartialResults, MergeByTheirLse) {
  Case c;
  c.q_len = 150;
  c.extra = 100;
  c.dim = c.v_dim = 48;
  for (const std::int64_t width : {1, 32, 100, 1000}) {  // at 1000 the second part is empty
    const Problem problem = make_problem(c);
    AttentionInput input = problem.input();
    for (const IsaLevel level : available_isa_levels()) {
      SCOPED_TRACE(testing::Message() << isa_name(level) << ", stripes of " << width);
      const Result whole = make_result(input, DType::kF32, Layout::kPacked);
      attention_cpu(input, problem.params, whole.output(), nullptr, level);
      Result parts[2];
      for (int side = 0; side < 2; ++side) {
        const std::vector<std::uint64_t> words = stripes(c.q_len, c.q_len + c.extra, width, side);
        AttentionInput masked = input;
        masked.mask = {words.data(), (c.q_len + c.extra + 63) / 64, 0};
        parts[side] = make_result(input, DType::kF32, Layout::kPacked);
        attention_cpu(masked, problem.params, parts[side].output(), nullptr, level);
      }
      // Exact algebra: what is left is the rounding of one run, f32 or bf16, for values of order 4.
      const double tolerance = isa_is_bf16(level) ? 0x1p-7 : 0x1p-19;
      for (std::int64_t t = 0; t < c.q_len; ++t) {
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const double a = parts[0].lse.get(0, t, h, 0);
          const double b = parts[1].lse.get(0, t, h, 0);
          const double maximum = std::max(a, b);
          const double lse = maximum + std::log(std::exp(a - maximum) + std::exp(b - maximum));
          ASSERT_NEAR(whole.lse.get(0, t, h, 0), lse, tolerance) << "row " << t;
          for (std::int64_t d = 0; d < c.v_dim; ++d) {
            const double merged = std::exp(a - lse) * parts[0].out.get(0, t, h, d) +
                                  std::exp(b - lse) * parts[1].out.get(0, t, h, d);
            ASSERT_NEAR(whole.out.get(0, t, h, d), merged, tolerance) << "row " << t;
          }
        }
      }
    }
  }
}

// Every element of the output is 0 and every LSE is `lse`.
void expect_empty(const Result& result, std::int64_t rows, float lse) {
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t h = 0; h < result.lse.view().heads(); ++h) {
      EXPECT_EQ(result.lse.get(0, t, h, 0), lse) << "row " << t;
      for (std::int64_t d = 0; d < result.out.view().dim(); ++d) {
        ASSERT_EQ(result.out.get(0, t, h, d), 0.0F) << "row " << t;
      }
    }
  }
}

TEST(EmptyRows, ComeOutAsZeroAndMinusInfinity) {
  for (const IsaLevel level : available_isa_levels()) {
    SCOPED_TRACE(isa_name(level));
    {
      Case c;  // no key at all
      c.q_len = 70;
      c.extra = -70;
      const Problem problem = make_problem(c);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPaddedRows);
      attention_cpu(problem.input(), problem.params, result.output(), nullptr, level);
      expect_empty(result, 70, -kInfinity);
    }
    {
      Case c;  // rows before position 0
      c.q_len = 100;
      c.extra = -80;
      const Problem problem = make_problem(c);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      attention_cpu(problem.input(), problem.params, result.output(), nullptr, level);
      expect_empty(result, 80, -kInfinity);
      EXPECT_TRUE(std::isfinite(result.lse.get(0, 80, 0, 0)));
    }
    {
      Case c;  // an index that keeps nothing
      c.pattern = Pattern::kUnionRuns;
      c.budget = Budget::kNothing;
      const Problem problem = make_problem(c);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      const Stats stats =
          attention_cpu(problem.input(), problem.params, result.output(), problem.index(), level);
      expect_empty(result, c.q_len, -kInfinity);
      EXPECT_EQ(stats.kept_pairs, 0);
    }
    {
      Case c;  // with a sink, its logit is the whole sum
      c.q_len = 70;
      c.extra = -70;
      Problem problem = make_problem(c);
      problem.sinks.assign(c.q_heads, 2.0F);
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      attention_cpu(problem.input(), problem.params, result.output(), nullptr, level);
      for (std::int64_t t = 0; t < c.q_len; ++t) {
        EXPECT_NEAR(result.lse.get(0, t, 0, 0), 2.0F, 0x1p-20);
        EXPECT_EQ(result.out.get(0, t, 0, 0), 0.0F);
      }
    }
  }
}

TEST(EmptyRows, DoNotDisturbTheirRowBlock) {
  Case c;  // padding on the left of a sequence: the rows there see nothing
  c.q_len = 128;
  c.extra = 0;
  const Problem problem = make_problem(c);
  AttentionInput input = problem.input();
  std::vector<std::uint64_t> words(128 * 2, 0);
  for (std::int64_t row = 40; row < 128; ++row) {
    for (std::int64_t key = 40; key <= row; ++key) words[row * 2 + key / 64] |= 1ULL << (key % 64);
  }
  AttentionInput padded = input;
  padded.mask = {words.data(), 2, 0};
  // The same text without its padding.
  AttentionInput bare = input;
  for (TensorView* tensor : {&bare.q, &bare.k, &bare.v}) {
    tensor->data = tensor->row(0, 40, 0);
    tensor->shape[1] = 88;
  }
  for (const IsaLevel level : available_isa_levels()) {
    const Result with_padding = make_result(padded, DType::kF32, Layout::kPacked);
    const Result without = make_result(bare, DType::kF32, Layout::kPacked);
    attention_cpu(padded, problem.params, with_padding.output(), nullptr, level);
    attention_cpu(bare, problem.params, without.output(), nullptr, level);
    expect_empty(with_padding, 40, -kInfinity);
    const float tolerance = isa_is_bf16(level) ? 0x1p-7F : 0x1p-19F;
    for (std::int64_t t = 0; t < 88; ++t) {
      for (std::int64_t d = 0; d < c.v_dim; ++d) {
        ASSERT_NEAR(with_padding.out.get(0, 40 + t, 1, d), without.out.get(0, t, 1, d), tolerance)
            << isa_name(level) << ", row " << t;
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

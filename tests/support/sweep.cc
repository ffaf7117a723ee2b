#include "support/sweep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "attention/reference/reference.h"
#include "core/float16.h"
#include "support/naive.h"

namespace minference::test {
namespace {

// Output and LSE of the rows that exist, in [batch][rows][heads][dim] order.
struct Rows {
  std::vector<double> out;
  std::vector<double> lse;
};

// Reads the rows that exist and poisons them again, so that what is left shows stray writes.
Rows take_rows(const AttentionInput& input, Result& result) {
  Rows rows;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    for (std::int64_t t = 0; t < query_length(input, b); ++t) {
      for (std::int64_t h = 0; h < input.q.heads(); ++h) {
        for (std::int64_t d = 0; d < input.v.dim(); ++d) {
          rows.out.push_back(result.out.get(b, t, h, d));
        }
        rows.lse.push_back(result.lse.get(b, t, h, 0));
        result.out.poison_row(b, t, h);
        result.lse.poison_row(b, t, h);
      }
    }
  }
  return rows;
}

struct Error {
  double maximum = 0;
  double root_mean_square = 0;
};

// Infinities must agree; they and nothing else count as no error when they do.
Error error_of(const std::vector<double>& actual, const std::vector<double>& expected) {
  Error error;
  double squares = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    double difference = std::abs(actual[i] - expected[i]);
    if (std::isinf(expected[i]) && actual[i] == expected[i]) difference = 0;
    if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
    error.maximum = std::max(error.maximum, difference);
    squares += difference * difference;
  }
  if (!actual.empty())
    error.root_mean_square = std::sqrt(squares / static_cast<double>(actual.size()));
  return error;
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

double largest_value(const AttentionInput& input) {
  double result = 0;
  for (std::int64_t b = 0; b < input.v.batch(); ++b) {
    for (std::int64_t t = 0; t < input.v.tokens(); ++t) {
      for (std::int64_t h = 0; h < input.v.heads(); ++h) {
        for (std::int64_t d = 0; d < input.v.dim(); ++d) {
          const auto* row = input.v.row(b, t, h);
          const double value = std::abs(load_element(row, input.v.dtype, d));
          if (value > result) result = value;  // false for poison
        }
      }
    }
  }
  return result;
}

// Large scores make some rows a near-tie of two keys, which either key may win: there the largest
// error says nothing, and the mean one depends on how many such rows a case happens to have.
void expect_within(const char* what, const Error& error, const Error& naive, double slack,
                   bool near_ties) {
  if (!near_ties) {
    EXPECT_LE(error.maximum, 2 * naive.maximum + slack)
        << what << ": largest error; naive run " << naive.maximum << ", slack " << slack;
  }
  EXPECT_LE(error.root_mean_square, (near_ties ? 4 : 2) * naive.root_mean_square + slack)
      << what << ": root mean square error; naive run " << naive.root_mean_square << ", slack "
      << slack;
}

Rows run_naive(const Problem& problem, const Case& c, bool bf16) {
  const AttentionInput input = problem.input();
  Result result = make_result(input, c.out_dtype, Layout::kPacked);
  naive_attention(input, problem.params, result.output(), problem.index(), bf16);
  return take_rows(input, result);
}

// How far a result may be off beyond twice the naive run's error, and why.
struct Slack {
  double out = 0;
  double lse = 0;
};

Slack slack_of(const Case& c, const Problem& problem, const Rows& expected, bool bf16) {
  constexpr double kUnit = 0x1p-24;  // one f32 rounding
  // Largest score that matters to rounding: a soft cap is computed as cap - 2 cap / (e^x + 1).
  const double score = std::max({1.0, largest(expected.lse), static_cast<double>(c.soft_cap)});
  const double value = largest_value(problem.input());
  Slack slack;
  // Exponential, sum, quotient, change of base and conversion are good to one or two roundings
  // each; where all values are equal a dot product rounds the same way at every other step.
  slack.out = 8 * kUnit * value * std::max(1.0, static_cast<double>(c.soft_cap));
  slack.lse = (8 + static_cast<double>(c.dim) / 2) * kUnit * score;
  if (bf16) {
    // The exponential of a bf16 level is good to 2^-13 only, well below the rounding of a
    // probability to bf16. In the smallest cases a handful of roundings do not average out, so that
    // one rounding of a probability and of a score are granted; exact values have none.
    const double one_rounding = c.values == Values::kExact ? 0x1p-13 : 0x1p-8;
    slack.out += one_rounding * value;
    slack.lse += one_rounding * score;
  }
  // Subnormal numbers may count as zero: the bf16 instructions do so.
  slack.out += 0x1p-126;
  return slack;
}

void judge(const Case& c, const Problem& problem, IsaLevel level, const Rows& actual,
           const Rows& expected, const Rows& naive) {
  const Slack slack = slack_of(c, problem, expected, isa_is_bf16(level));
  expect_within("output", error_of(actual.out, expected.out), error_of(naive.out, expected.out),
                slack.out, c.values == Values::kOrder30);
  expect_within("LSE", error_of(actual.lse, expected.lse), error_of(naive.lse, expected.lse),
                slack.lse, false);
}

}  // namespace

void expect_matches_reference(const Case& c, const Runner& run,
                              const std::vector<IsaLevel>& levels) {
  expect_matches_reference(c, make_problem(c), run, levels);
}

void expect_matches_reference(const Case& c, const Problem& problem, const Runner& run,
                              const std::vector<IsaLevel>& levels) {
  SCOPED_TRACE(describe(c));
  const AttentionInput input = problem.input();
  Result exact = make_result(input, DType::kF32, Layout::kPacked);
  const Stats counted = attention_reference(input, problem.params, exact.output(), problem.index());
  const Rows expected = take_rows(input, exact);
  std::optional<Rows> naive[2];
  for (const IsaLevel level : levels) {
    SCOPED_TRACE(isa_name(level));
    const bool bf16 = isa_is_bf16(level);
    if (!naive[bf16]) naive[bf16] = run_naive(problem, c, bf16);
    Result result = make_result(input, c.out_dtype, c.layout);
    const Stats stats = run(input, problem.params, result.output(), problem.index(), level);
    const Rows actual = take_rows(input, result);
    EXPECT_TRUE(result.out.all_poison()) << "wrote outside the rows of the output";
    EXPECT_TRUE(result.lse.all_poison()) << "wrote outside the rows of the LSE";
    EXPECT_EQ(stats.isa, level);
    EXPECT_EQ(stats.kept_pairs, counted.kept_pairs);
    EXPECT_EQ(stats.causal_pairs, counted.causal_pairs);
    judge(c, problem, level, actual, expected, *naive[bf16]);
  }
}

}  // namespace minference::test

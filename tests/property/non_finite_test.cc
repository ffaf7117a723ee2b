// A NaN or infinity in q, k or v reaches only the rows that see it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/cpu/executor.h"
#include "attention/reference/reference.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Result run(const Problem& problem, IsaLevel level) {
  Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
  attention_cpu(problem.input(), problem.params, result.output(), problem.index(), level);
  return result;
}

// Which keys each row of a head sees.
class Sight {
 public:
  Sight(const Problem& problem, std::int64_t h)
      : mask_(explicit_mask(problem.input(), problem.params, 0, h, problem.index())),
        keys_(key_length(problem.input(), 0)) {}

  bool sees(std::int64_t row, std::int64_t key) const { return mask_[row * keys_ + key] != 0; }

 private:
  std::vector<std::uint8_t> mask_;
  std::int64_t keys_;
};

// Every rule that hides keys, alone: the causal one, a window, a mask, and the forms of an index.
std::vector<Case> hiding_cases() {
  Case causal = six_heads(Pattern::kNone);
  causal.q_len = 150;  // three row blocks, the last of them partial in rows and in 16-row strips
  causal.extra = 49;
  causal.dim = causal.v_dim = 48;
  Case window = causal;
  window.window = 70;
  Case mask = causal;
  mask.mask = MaskKind::kRandom;
  std::vector<Case> cases = {causal, window, mask};
  for (const Pattern pattern : {Pattern::kUnionRuns, Pattern::kStridedRuns, Pattern::kBlocks}) {
    cases.push_back(causal);
    cases.back().pattern = pattern;
  }
  cases.push_back(causal);
  cases.back().pattern = Pattern::kMixed;
  cases.back().dense_last_rows = 21;
  const std::size_t n = cases.size();
  for (std::size_t i = 0; i < n; ++i) {
    cases.push_back(cases[i]);
    cases.back().q_dtype = cases.back().kv_dtype = i % 2 == 0 ? DType::kBF16 : DType::kF16;
  }
  return cases;
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// The first key, edges of granules, tiles and batches, the middle, and the last one.
constexpr std::int64_t kSpoiledKeys[] = {0, 31, 32, 77, 127, 128, 150, 198};

TEST(NonFinite, ValueReachesOnlyTheRowsThatSeeIt) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    Problem spoiled = make_problem(c);
    // Dim 5 gets NaN, dim 20 +inf and dim 21 -inf; where a row sees the keys of both, dim 40 is
    // +inf - inf = NaN. One head is spoiled everywhere, the others at one key each.
    const auto keys_of = [&](std::int64_t h) {
      if (h == 0)
        return std::vector<std::int64_t>(std::begin(kSpoiledKeys), std::end(kSpoiledKeys));
      return std::vector<std::int64_t>{kSpoiledKeys[h]};
    };
    for (std::int64_t h = 0; h < c.kv_heads; ++h) {
      for (const std::int64_t key : keys_of(h)) {
        spoiled.v.set(0, key, h, 5, kNaN);
        spoiled.v.set(0, key, h, 20, kInfinity);
        spoiled.v.set(0, key, h, 21, -kInfinity);
        spoiled.v.set(0, key, h, 40, key < 100 ? kInfinity : -kInfinity);
      }
    }
    for (const IsaLevel level : available_isa_levels()) {
      const Result expected = run(clean, level);
      const Result actual = run(spoiled, level);
      EXPECT_EQ(first_difference(actual.lse.values(), expected.lse.values()), -1);
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        const Sight sight(clean, h);
        for (std::int64_t row = 0; row < c.q_len; ++row) {
          const auto sees = [&](bool late) {
            const std::vector<std::int64_t> keys = keys_of(h);
            return std::any_of(keys.begin(), keys.end(), [&](std::int64_t key) {
              return (key >= 100) == late && sight.sees(row, key);
            });
          };
          const bool early = sees(false);
          const bool late = sees(true);
          for (std::int64_t d = 0; d < c.v_dim; ++d) {
            const float value = actual.out.get(0, row, h, d);
            bool right = same_bits(value, expected.out.get(0, row, h, d));
            if (early || late) {
              if (d == 5) right = std::isnan(value);
              // A weight below the smallest float is 0, and makes NaN of an infinity.
              if (d == 20) right = value == kInfinity || std::isnan(value);
              if (d == 21) right = value == -kInfinity || std::isnan(value);
              if (d == 40 && early && late) right = std::isnan(value);
              if (d == 40 && early != late) right = std::isinf(value) || std::isnan(value);
            }
            ASSERT_TRUE(right) << isa_name(level) << ", head " << h << ", row " << row << ", dim "
                               << d << ": " << value << ", sees " << early << late;
          }
        }
      }
    }
  }
}

TEST(NonFinite, KeyReachesOnlyTheRowsThatSeeIt) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    for (const float bad : {kNaN, kInfinity, -kInfinity}) {
      Problem spoiled = make_problem(c);
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        // Zero queries make NaN of an infinity too: everything is spoiled, whatever its sign.
        for (std::int64_t d = 0; d < c.dim; ++d) spoiled.k.set(0, kSpoiledKeys[h], h, d, bad);
      }
      for (const IsaLevel level : available_isa_levels()) {
        const Result expected = run(clean, level);
        const Result actual = run(spoiled, level);
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const Sight sight(clean, h);
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const bool sees = sight.sees(row, kSpoiledKeys[h]);
            const float lse = actual.lse.get(0, row, h, 0);
            ASSERT_TRUE(sees ? std::isnan(lse) : same_bits(lse, expected.lse.get(0, row, h, 0)));
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              ASSERT_TRUE(sees ? std::isnan(value)
                               : same_bits(value, expected.out.get(0, row, h, d)))
                  << isa_name(level) << ", key of " << bad << ", head " << h << ", row " << row
                  << ", dim " << d << ": " << value;
            }
          }
        }
      }
    }
  }
}

TEST(NonFinite, QueryReachesItsOwnRowOnly) {
  for (const Case& c : hiding_cases()) {
    SCOPED_TRACE(describe(c));
    const Problem clean = make_problem(c);
    for (const float bad : {kNaN, kInfinity}) {
      Problem spoiled = make_problem(c);
      // First, inner and last rows of row blocks and of strips of 16 rows.
      const std::vector<std::int64_t> rows = {0, 15, 16, 63, 64, 100, 149};
      for (const std::int64_t row : rows) {
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          for (std::int64_t d = 0; d < c.dim; ++d) spoiled.q.set(0, row, h, d, bad);
        }
      }
      for (const IsaLevel level : available_isa_levels()) {
        const Result expected = run(clean, level);
        const Result actual = run(spoiled, level);
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const float lse = expected.lse.get(0, row, h, 0);
            // A row that sees no key is 0 whatever its query.
            const bool spoils =
                std::find(rows.begin(), rows.end(), row) != rows.end() && lse != -kInfinity;
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              ASSERT_TRUE(spoils ? std::isnan(value)
                                 : same_bits(value, expected.out.get(0, row, h, d)))
                  << isa_name(level) << ", query of " << bad << ", head " << h << ", row " << row
                  << ", dim " << d << ": " << value;
            }
          }
        }
      }
    }
  }
}

// Rows whose query is positive in dim 0 score +inf at the spoiled keys, the others -inf.
TEST(NonFinite, InfiniteScoresAreJudgedByTheReference) {
  for (Case c : hiding_cases()) {
    for (const float cap : {0.0F, 5.0F}) {
      c.soft_cap = cap;
      SCOPED_TRACE(describe(c));
      const Problem clean = make_problem(c);
      Problem spoiled = make_problem(c);
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        spoiled.k.set(0, kSpoiledKeys[h], h, 0, kInfinity);
      }
      const Result expected = make_result(clean.input(), DType::kF32, Layout::kPacked);
      attention_reference(spoiled.input(), spoiled.params, expected.output(), spoiled.index());
      for (const IsaLevel level : available_isa_levels()) {
        const Result undisturbed = run(clean, level);
        const Result actual = run(spoiled, level);
        // Values are of order 4, scores of order 5: the tolerance is their rounding.
        const float tolerance =
            isa_is_bf16(level) || c.kv_dtype != DType::kF32 ? 0x1p-4F : 0x1p-15F;
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const Sight sight(clean, h);
          for (std::int64_t row = 0; row < c.q_len; ++row) {
            const bool sees = sight.sees(row, kSpoiledKeys[h]);
            for (std::int64_t d = 0; d < c.v_dim; ++d) {
              const float value = actual.out.get(0, row, h, d);
              const float judge = expected.out.get(0, row, h, d);
              const bool right = !sees ? same_bits(value, undisturbed.out.get(0, row, h, d))
                                 : std::isnan(judge) ? std::isnan(value)
                                                     : std::abs(value - judge) <= tolerance;
              ASSERT_TRUE(right) << isa_name(level) << ", head " << h << ", row " << row << ", dim "
                                 << d << ": " << value << " for " << judge;
            }
            if (!std::isnan(expected.out.get(0, row, h, 0)) && sees) {
              const float lse = expected.lse.get(0, row, h, 0);
              ASSERT_TRUE(lse == actual.lse.get(0, row, h, 0) ||
                          std::abs(lse - actual.lse.get(0, row, h, 0)) <= tolerance);
            }
          }
        }
      }
    }
  }
}

TEST(NonFinite, ScoresOfMinusInfinityCountAsUnseenKeys) {
  Case c;
  c.q_len = 70;
  c.extra = 0;
  Problem problem = make_problem(c);
  for (std::int64_t h = 0; h < c.q_heads; ++h) {
    for (std::int64_t t = 0; t < c.q_len; ++t) problem.q.set(0, t, h, 0, 1.0F);
  }
  for (std::int64_t h = 0; h < c.kv_heads; ++h) {  // rows 0 to 39 see no other key
    for (std::int64_t t = 0; t < 40; ++t) problem.k.set(0, t, h, 0, -kInfinity);
  }
  for (const IsaLevel level : available_isa_levels()) {
    const Result result = run(problem, level);
    for (std::int64_t t = 0; t < c.q_len; ++t) {
      const float lse = result.lse.get(0, t, 1, 0);
      ASSERT_TRUE(t < 40 ? lse == -kInfinity : std::isfinite(lse)) << isa_name(level) << ' ' << t;
      for (std::int64_t d = 0; d < c.v_dim; ++d) {
        const float value = result.out.get(0, t, 1, d);
        ASSERT_TRUE(t < 40 ? value == 0.0F : std::isfinite(value)) << isa_name(level) << ' ' << t;
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

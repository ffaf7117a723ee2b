// A prompt fed in chunks gives what it gives in one go: the alignment is bottom-right, and neither
// tile nor chunk borders show.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/cpu/executor.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

constexpr std::int64_t kTokens = 997;
constexpr std::int64_t kChunks[] = {1, 7, 64, 100, 512};

Case prompt(Pattern pattern) {
  Case c;
  c.q_len = kTokens;
  c.extra = 0;
  c.q_heads = 2;
  c.kv_heads = 1;
  c.dim = c.v_dim = 40;
  c.pattern = pattern;
  c.sinks = true;
  return c;
}

// The index for the first kv_len keys. Exact runs are relative and need no change.
SparseIndex shortened(SparseIndex index, std::int64_t kv_len) {
  for (HeadIndex& head : index.heads) {
    std::erase_if(head.columns, [=](std::int64_t column) { return column >= kv_len; });
  }
  return index;
}

void expect_chunks_equal_whole(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  for (const IsaLevel level : available_isa_levels()) {
    const Result whole = make_result(input, DType::kF32, Layout::kPacked);
    attention_cpu(input, problem.params, whole.output(), problem.index(), level);
    for (const std::int64_t chunk : kChunks) {
      const Result parts = make_result(input, DType::kF32, Layout::kPacked);
      for (std::int64_t begin = 0; begin < kTokens; begin += chunk) {
        const std::int64_t count = std::min(chunk, kTokens - begin);
        const AttentionInput part = part_of(input, 0, begin, count, begin + count);
        const AttentionOutput output = {tokens_of(parts.out.view(), 0, begin, count),
                                        tokens_of(parts.lse.view(), 0, begin, count)};
        if (problem.sparse) {
          const SparseIndex index = shortened(*problem.sparse, begin + count);
          attention_cpu(part, problem.params, output, &index, level);
        } else {
          attention_cpu(part, problem.params, output, nullptr, level);
        }
      }
      // Tiles may be cut elsewhere, so that sums are formed in another order and, at bf16 levels,
      // the exponentials are rounded around another shift: a few roundings of values of order 4.
      const float tolerance = isa_is_bf16(level) ? 0x1p-7F : 0x1p-19F;
      const std::vector<float> expected = whole.out.values();
      const std::vector<float> actual = parts.out.values();
      float worst = 0;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        worst = std::max(worst, std::abs(expected[i] - actual[i]));
      }
      EXPECT_LE(worst, tolerance) << isa_name(level) << ", chunks of " << chunk;
      const std::vector<float> expected_lse = whole.lse.values();
      const std::vector<float> actual_lse = parts.lse.values();
      for (std::size_t i = 0; i < expected_lse.size(); ++i) {
        ASSERT_NEAR(expected_lse[i], actual_lse[i], tolerance)
            << isa_name(level) << ", chunks of " << chunk << ", row and head " << i;
      }
    }
  }
}

TEST(ChunkedPrefill, Dense) { expect_chunks_equal_whole(prompt(Pattern::kNone)); }

TEST(ChunkedPrefill, AShape) { expect_chunks_equal_whole(prompt(Pattern::kAShape)); }

TEST(ChunkedPrefill, ExactRuns) { expect_chunks_equal_whole(prompt(Pattern::kExactRuns)); }

TEST(ChunkedPrefill, StridedRuns) { expect_chunks_equal_whole(prompt(Pattern::kStridedRuns)); }

TEST(ChunkedPrefill, SlidingWindow) {
  Case c = prompt(Pattern::kNone);
  c.window = 100;
  expect_chunks_equal_whole(c);
}

}  // namespace
}  // namespace minference::test

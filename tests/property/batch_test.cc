// A sequence does not feel its neighbours, its padding or where its pages lie: bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "attention/cpu/executor.h"
#include "attention/reference/reference.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

constexpr Pattern kPatterns[] = {Pattern::kNone, Pattern::kUnionRuns, Pattern::kStridedRuns,
                                 Pattern::kBlocks, Pattern::kMixed};

// Rows of sequence b that exist.
std::vector<float> rows_of(const TensorData& tensor, std::int64_t b, std::int64_t count) {
  std::vector<float> rows;
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t h = 0; h < tensor.view().heads(); ++h) {
      for (std::int64_t d = 0; d < tensor.view().dim(); ++d) {
        rows.push_back(tensor.get(b, t, h, d));
      }
    }
  }
  return rows;
}

// The index of sequence b alone, with the row blocks that its q_len needs.
SparseIndex index_of_sequence(const SparseIndex& index, std::int64_t b, std::int64_t q_len,
                              std::int64_t kv_len) {
  SparseIndex alone;
  alone.batch = 1;
  alone.q_heads = index.q_heads;
  for (std::int64_t h = 0; h < index.q_heads; ++h) {
    HeadIndex head = index.head(b, h);
    std::erase_if(head.columns, [=](std::int64_t column) { return column >= kv_len; });
    if (head.kind == HeadIndex::Kind::kBlock) {
      head.block_begin.resize((q_len + kRowBlock - 1) / kRowBlock + 1);
    }
    alone.heads.push_back(head);
  }
  return alone;
}

void expect_neighbours_ignored(Pattern pattern) {
  Case c;
  c.batch = 3;
  c.lengths = Lengths::kRagged;
  c.q_len = 1000;  // lengths 1000, 400 and 200
  c.extra = 333;
  c.q_heads = c.kv_heads = 6;
  c.dim = c.v_dim = 32;
  c.pattern = pattern;
  c.dense_last_rows = 5;
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  for (const IsaLevel level : available_isa_levels()) {
    const Result together = make_result(input, DType::kF32, Layout::kPacked);
    attention_cpu(input, problem.params, together.output(), problem.index(), level);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const std::int64_t q_len = query_length(input, b);
      const std::int64_t kv_len = key_length(input, b);
      const AttentionInput part = part_of(input, b, 0, q_len, kv_len);
      const Result alone = make_result(part, DType::kF32, Layout::kPacked);
      if (problem.sparse) {
        const SparseIndex index = index_of_sequence(*problem.sparse, b, q_len, kv_len);
        attention_cpu(part, problem.params, alone.output(), &index, level);
      } else {
        attention_cpu(part, problem.params, alone.output(), nullptr, level);
      }
      EXPECT_EQ(first_difference(rows_of(together.out, b, q_len), alone.out.values()), -1)
          << isa_name(level) << ", sequence " << b;
      EXPECT_EQ(first_difference(rows_of(together.lse, b, q_len), alone.lse.values()), -1)
          << isa_name(level) << ", sequence " << b;
    }
  }
}

void expect_pages_ignored(Pattern pattern, std::int64_t page_size) {
  Case c;
  c.batch = 2;
  c.lengths = Lengths::kRagged;
  c.q_len = 300;
  c.extra = 77;
  c.q_heads = c.kv_heads = 6;
  c.dim = c.v_dim = 32;
  c.page_size = page_size;
  c.pattern = pattern;
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  const AttentionInput paged = problem.input();
  // The same keys and values in order.
  const std::int64_t tokens = problem.pages_per_sequence * page_size;
  TensorData k({c.batch, tokens, c.kv_heads, c.dim}, DType::kF32, Layout::kPacked);
  TensorData v({c.batch, tokens, c.kv_heads, c.v_dim}, DType::kF32, Layout::kPacked);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t t = 0; t < problem.kv_lens[b]; ++t) {
      const std::int64_t page = problem.block_table[b * problem.pages_per_sequence + t / page_size];
      for (std::int64_t h = 0; h < c.kv_heads; ++h) {
        for (std::int64_t d = 0; d < c.dim; ++d) {
          k.set(b, t, h, d, problem.k.get(page, t % page_size, h, d));
          v.set(b, t, h, d, problem.v.get(page, t % page_size, h, d));
        }
      }
    }
  }
  AttentionInput contiguous = paged;
  contiguous.k = k.view();
  contiguous.v = v.view();
  contiguous.block_table = {};
  contiguous.pages_per_sequence = 0;
  for (const IsaLevel level : available_isa_levels()) {
    const Result from_pages = make_result(paged, DType::kF32, Layout::kPacked);
    const Result in_order = make_result(paged, DType::kF32, Layout::kPacked);
    attention_cpu(paged, problem.params, from_pages.output(), problem.index(), level);
    attention_cpu(contiguous, problem.params, in_order.output(), problem.index(), level);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      EXPECT_EQ(first_difference(rows_of(from_pages.out, b, problem.q_lens[b]),
                                 rows_of(in_order.out, b, problem.q_lens[b])),
                -1)
          << isa_name(level) << ", page " << page_size << ", sequence " << b;
    }
  }
}

void expect_threads_ignored(Pattern pattern) {
  Case c;
  c.q_len = 500;
  c.q_heads = c.kv_heads = 6;
  c.pattern = pattern;
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  for (const IsaLevel level : available_isa_levels()) {
    std::vector<float> expected;
    for (const int threads : {1, 2, 5}) {
      AttentionParams params = problem.params;
      params.threads = threads;
      const Result result = make_result(input, DType::kF32, Layout::kPacked);
      attention_cpu(input, params, result.output(), problem.index(), level);
      if (expected.empty()) expected = result.out.values();
      EXPECT_EQ(first_difference(result.out.values(), expected), -1)
          << isa_name(level) << ", " << threads << " threads";
    }
  }
}

TEST(Neighbours, DoNotChangeASequence) {
  for (const Pattern pattern : kPatterns) expect_neighbours_ignored(pattern);
}

TEST(Neighbours, ShuffledPagesEqualContiguousKeys) {
  for (const Pattern pattern : kPatterns) {
    for (const std::int64_t page_size : {1, 16, 48, 64}) expect_pages_ignored(pattern, page_size);
  }
}

TEST(Neighbours, ThreadsDoNotChangeTheResult) {
  for (const Pattern pattern : kPatterns) expect_threads_ignored(pattern);
}

TEST(GroupedQueries, ReadTheirOwnKvHead) {
  constexpr std::int64_t kHeads[][2] = {{1, 1},  {2, 1},  {3, 1},  {4, 1},  {5, 1},
                                        {6, 1},  {7, 1},  {8, 1},  {16, 1}, {64, 1},
                                        {28, 4}, {40, 8}, {14, 2}, {9, 3}};
  for (const auto& [q_heads, kv_heads] : kHeads) {
    Case c;
    c.q_heads = q_heads;
    c.kv_heads = kv_heads;
    c.q_len = 33;
    Problem problem = make_problem(c);
    const std::int64_t kv_len = c.q_len + c.extra;
    for (std::int64_t t = 0; t < kv_len; ++t) {  // every value is the number of its KV head
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        for (std::int64_t d = 0; d < c.v_dim; ++d) {
          problem.v.set(0, t, h, d, static_cast<float>(h));
        }
      }
    }
    const AttentionInput input = problem.input();
    for (const IsaLevel level : available_isa_levels()) {
      const Result result = make_result(input, DType::kF32, Layout::kPacked);
      attention_cpu(input, problem.params, result.output(), nullptr, level);
      for (std::int64_t h = 0; h < q_heads; ++h) {
        const auto expected = static_cast<float>(h / (q_heads / kv_heads));
        // Probabilities that are rounded to bf16 sum to 1 only within that rounding.
        EXPECT_NEAR(result.out.get(0, 32, h, 5), expected, expected * 0x1p-8F)
            << isa_name(level) << ", heads " << q_heads << ":" << kv_heads << ", head " << h;
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

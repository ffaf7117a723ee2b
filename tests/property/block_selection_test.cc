// What the block methods select: planted keys are found, budgets are monotone, own keys are kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "minference/guard.h"
#include "minference/method.h"
#include "support/problem.h"
#include "support/selection.h"
#include "support/views.h"

namespace minference::test {
namespace {

using Setting = std::pair<const char*, MethodOptions>;

SparseIndex build(const Setting& setting, const Problem& problem, int threads = 0) {
  const Method& found = find_method(setting.first);
  AttentionParams params = problem.params;
  params.threads = threads;
  return found.build_index(problem.input(), params, resolve_options(found, setting.second), {});
}

bool has_block(const HeadIndex& head, std::int64_t m, std::int64_t n) {
  if (head.kind == HeadIndex::Kind::kDense) return true;
  const auto ids = head.block_ids.begin();
  return std::binary_search(ids + head.block_begin[m], ids + head.block_begin[m + 1], n);
}

TEST(PlantedKey, IsInABlockOfEveryRow) {
  for (const auto& [q_heads, kv_heads] : kGroupedHeads) {
    for (const std::int64_t q_len : {1, 700}) {
      Case c;
      c.q_len = q_len;
      c.extra = 1500 - q_len;
      c.q_heads = q_heads;
      c.kv_heads = kv_heads;
      c.dim = c.v_dim = 16;
      c.page_size = q_len == 1 ? 48 : 0;
      SCOPED_TRACE(describe(c));
      Problem problem = make_problem(c);
      // Seen by every row, in no block that is kept anyway; one a KV head.
      const auto planted = [](std::int64_t kv_head) { return 301 + 200 * kv_head; };
      plant_keys(c, planted, 200, problem);
      for (const Setting& setting :
           {Setting{"block_sparse", {{"top_k", 4}}}, Setting{"flexprefill", {{"gamma", 0.5}}},
            Setting{"xattention", {{"threshold", 0.5}}},
            Setting{"inf_llm", {{"n_local", 128}, {"topk", 1}}}}) {
        SCOPED_TRACE(setting.first);
        const SparseIndex index = build(setting, problem);
        for (std::int64_t h = 0; h < q_heads; ++h) {
          EXPECT_EQ(index.head(0, h).kind, HeadIndex::Kind::kBlock);
          for (std::int64_t m = 0; m * kRowBlock < c.q_len; ++m) {
            EXPECT_TRUE(has_block(index.head(0, h), m, planted(h / (q_heads / kv_heads)) / 64))
                << "head " << h << ", row block " << m;
          }
        }
        for (const double recall : mass_recall(problem.input(), problem.params, index, 16)) {
          EXPECT_GT(recall, 0.99);
        }
      }
    }
  }
}

// More of `option` never keeps less, up to everything at its largest value.
void expect_monotone(Setting setting, const char* option, const std::vector<double>& rising) {
  Case c;
  c.q_len = 700;
  c.extra = 333;
  c.q_heads = 3;
  c.kv_heads = 1;
  c.dim = c.v_dim = 32;
  const Problem problem = make_problem(c);
  std::vector<double> previous(c.q_heads, 0.0);
  for (const double value : rising) {
    setting.second[option] = value;
    const std::vector<double> recall =
        mass_recall(problem.input(), problem.params, build(setting, problem), 32);
    expect_no_less(recall, previous,
                   std::string(setting.first) + ", " + option + " " + std::to_string(value));
  }
  for (const double recall : previous) EXPECT_NEAR(recall, 1, 1e-6) << setting.first;
}

TEST(BlockBudgets, MoreNeverKeepsLess) {
  const std::vector<double> shares = {0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1};
  expect_monotone({"block_sparse", {}}, "top_k", {1, 2, 3, 4, 6, 8, 10, 14, 17, 1000});
  for (const double block_size : {64, 128}) {
    expect_monotone({"xattention", {{"block_size", block_size}}}, "threshold", shares);
    for (const double tau : {0, 1}) {
      expect_monotone({"flexprefill", {{"block_size", block_size}, {"tau", tau}}}, "gamma", shares);
    }
  }
  const MethodOptions inf_llm{
      {"n_init", 0}, {"n_local", 100}, {"topk", 1}, {"block_size", 64}, {"exc_block_size", 128}};
  expect_monotone({"inf_llm", inf_llm}, "topk", {1, 2, 3, 5, 8, 12, 17, 1000});
  expect_monotone({"inf_llm", inf_llm}, "n_init", {0, 1, 64, 65, 200, 500, 900, 1100});
  expect_monotone({"inf_llm", inf_llm}, "n_local", {1, 64, 65, 200, 500, 900, 1100});
  expect_monotone({"flexprefill", {{"gamma", 0}, {"block_size", 64}}}, "min_budget",
                  {0, 64, 65, 200, 400, 700, 1000, 1100});
  expect_monotone({"flexprefill", {{"gamma", 1}, {"block_size", 64}, {"tau", 0}}}, "max_budget",
                  {1, 64, 65, 200, 400, 700, 1000, 1100});
}

const std::vector<Setting>& smallest() {
  static const std::vector<Setting> settings = {
      {"block_sparse", {{"top_k", 1}}},
      {"flexprefill", {{"gamma", 0}}},
      {"flexprefill", {{"gamma", 0}, {"tau", 1}, {"block_size", 64}}},
      {"xattention", {{"threshold", 0}}},
      {"xattention", {{"threshold", 0}, {"block_size", 64}}},
      {"inf_llm", {{"n_init", 1}, {"n_local", 1}, {"topk", 1}, {"block_size", 64}}},
  };
  return settings;
}

// Wherever a chunk begins, and whatever an estimate says, every row sees its own key and the first.
TEST(BlockBudgets, EveryRowKeepsItsOwnKeyAndTheFirst) {
  for (const std::int64_t extra : {0, 1, 63, 64, 100, 200, 511}) {
    for (const std::int64_t q_len : {1, 64, 300}) {
      Case c;
      c.q_len = q_len;
      c.extra = extra;
      c.dim = c.v_dim = 16;
      const Problem problem = make_problem(c);
      for (const Setting& setting : smallest()) {
        const SparseIndex index = build(setting, problem);
        for (const HeadIndex& head : index.heads) {
          for (std::int64_t row = 0; row < q_len; ++row) {
            ASSERT_TRUE(has_block(head, row / 64, (extra + row) / 64)) << describe(c);
            ASSERT_TRUE(has_block(head, row / 64, 0)) << describe(c);
          }
        }
      }
    }
  }
}

TEST(BlockBudgets, LargerThanTheTextAreDense) {
  for (const Setting& setting :
       {Setting{"block_sparse", {}}, Setting{"flexprefill", {}},
        Setting{"xattention", {{"threshold", 1}}}, Setting{"inf_llm", {}}}) {
    for (std::int64_t length = 1; length <= 70; ++length) {
      Case c;
      c.q_len = length;
      c.extra = 0;
      c.dim = c.v_dim = 8;
      const Problem problem = make_problem(c);
      for (const HeadIndex& head : build(setting, problem).heads) {
        EXPECT_EQ(head.kind, HeadIndex::Kind::kDense) << setting.first << ", " << length;
      }
    }
  }
}

const std::vector<Setting>& typical() {
  static const std::vector<Setting> settings = {
      {"block_sparse", {{"top_k", 5}}},
      {"flexprefill", {{"gamma", 0.6}}},
      {"flexprefill", {{"gamma", 0.6}, {"tau", 1}}},
      {"xattention", {{"threshold", 0.7}}},
      {"inf_llm", {{"n_local", 130}, {"topk", 1}, {"exc_block_size", 128}}},
  };
  return settings;
}

TEST(BlockIndices, DoNotDependOnThreadsOrNeighbours) {
  Case c;
  c.batch = 3;
  c.lengths = Lengths::kRagged;
  c.q_len = 700;
  c.extra = 300;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  for (const Setting& setting : typical()) {
    const SparseIndex index = build(setting, problem, 1);
    const SparseIndex threads = build(setting, problem, 5);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const Method& method = find_method(setting.first);
      const AttentionInput alone =
          part_of(problem.input(), b, 0, problem.q_lens[b], problem.kv_lens[b]);
      const SparseIndex expected =
          method.build_index(alone, problem.params, resolve_options(method, setting.second), {});
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        const HeadIndex& head = index.head(b, h);
        EXPECT_EQ(head.block_ids, threads.head(b, h).block_ids) << setting.first;
        EXPECT_EQ(head.kind, expected.head(0, h).kind) << setting.first;
        EXPECT_EQ(head.block_ids, expected.head(0, h).block_ids) << setting.first;
      }
    }
  }
}

// Broken activations must not become broken memory accesses.
TEST(BlockIndices, AreWellFormedWhateverTheValues) {
  for (const float value : kBrokenValues) {
    Case c;
    c.q_len = 500;
    c.extra = 77;
    c.dim = c.v_dim = 16;
    const Problem problem = make_broken_problem(c, value);
    for (const Setting& setting : typical()) {
      const SparseIndex index = build(setting, problem);
      EXPECT_NO_THROW(validate(index, 1, c.q_heads, c.q_len, c.q_len + c.extra)) << setting.first;
      for (const HeadIndex& head : index.heads) {
        for (std::int64_t row = 0; row < c.q_len; ++row) {
          ASSERT_TRUE(has_block(head, row / 64, (c.extra + row) / 64)) << setting.first;
        }
      }
    }
  }
}

}  // namespace
}  // namespace minference::test

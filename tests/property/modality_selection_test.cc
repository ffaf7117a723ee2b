// What mminference selects in prompts with visual segments: planted keys are found, budgets are
// monotone, own keys are kept, whatever the kind of head.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/reference/reference.h"
#include "minference/guard.h"
#include "minference/method.h"
#include "support/problem.h"
#include "support/selection.h"
#include "support/views.h"

namespace minference::test {
namespace {

constexpr double kKinds[] = {0, 1, 2, 3, 4};

MethodOptions small(double kind) {
  return {{"kind", kind},   {"vertical_size", 40}, {"slash_size", 102}, {"n_init", 20},
          {"n_local", 100}, {"min_stride", 200},   {"max_stride", 300}, {"fold_columns", 50}};
}

// Every sequence of the problem with the same segments, which later chunks may reach.
SparseIndex build(const AttentionInput& input, AttentionParams params, const MethodOptions& options,
                  const std::vector<Segment>& segments, int threads = 0) {
  const Method& method = find_method("mminference");
  const std::vector<std::span<const Segment>> spans(input.q.batch(), segments);
  const std::vector<std::int64_t> rows_after(input.q.batch(), 100000);
  MethodContext context;
  context.segments = spans;
  context.rows_after = rows_after;
  params.threads = threads;
  return method.build_index(input, params, resolve_options(method, options), context);
}

// Pictures, a question between them, and one at the end.
std::vector<Segment> pictures() {
  return {{50, 900, Modality::kVisual}, {1000, 1850, Modality::kVisual}};
}

TEST(ModalityPlantedKey, IsKeptByEveryHeadOfItsGroup) {
  for (const auto& [q_heads, kv_heads] : kGroupedHeads) {
    Case c;
    c.q_len = 700;
    c.extra = 1300;
    c.q_heads = q_heads;
    c.kv_heads = kv_heads;
    c.dim = c.v_dim = 16;
    c.page_size = q_heads == 3 ? 48 : 0;
    SCOPED_TRACE(describe(c));
    Problem problem = make_problem(c);
    // Seen by every row, far from the sinks and from the windows; one a KV head.
    const auto planted = [](std::int64_t kv_head) { return 301 + 200 * kv_head; };
    plant_keys(c, planted, 30, problem);
    const AttentionInput input = problem.input();
    for (const double kind : kKinds) {
      const SparseIndex index = build(input, problem.params, small(kind), pictures());
      for (std::int64_t h = 0; h < q_heads; ++h) {
        EXPECT_NE(index.head(0, h).kind, HeadIndex::Kind::kDense) << "kind " << kind;
        const std::vector<std::uint8_t> kept = explicit_mask(input, problem.params, 0, h, &index);
        const std::int64_t kv_len = c.q_len + c.extra;
        for (std::int64_t row = 0; row < c.q_len; ++row) {
          ASSERT_EQ(kept[row * kv_len + planted(h / (q_heads / kv_heads))], 1)
              << "kind " << kind << ", row " << row;
        }
      }
      for (const double recall : mass_recall(input, problem.params, index, 16)) {
        EXPECT_GT(recall, 0.99) << "kind " << kind;
      }
    }
  }
}

TEST(ModalityBudgets, MoreNeverKeepsLess) {
  Case c;
  c.q_len = 700;
  c.extra = 1300;
  c.q_heads = 3;
  c.kv_heads = 1;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  for (const auto& [kind, option] : {std::pair{1, "n_init"},
                                     {1, "n_local"},
                                     {2, "vertical_size"},
                                     {2, "slash_size"},
                                     {3, "vertical_size"},
                                     {3, "slash_size"},
                                     {4, "vertical_size"},
                                     {4, "slash_size"}}) {
    std::vector<double> previous(c.q_heads, 0.0);
    for (const double value : {1, 30, 64, 100, 101, 130, 200, 500, 1000, 1999, 5000}) {
      MethodOptions options = small(kind);
      options[option] = value;
      const std::vector<double> recall =
          mass_recall(problem.input(), problem.params,
                      build(problem.input(), problem.params, options, pictures()), 32);
      expect_no_less(recall, previous,
                     "kind " + std::to_string(kind) + ", " + option + " " + std::to_string(value));
    }
    for (const double recall : previous) EXPECT_NEAR(recall, 1, 1e-6) << option;
  }
}

// A coarser kind of head keeps nothing that a finer one lacks: what `auto` weighs is only cost.
TEST(ModalityBudgets, PairsKeepWhatGroupsKeep) {
  Case c;
  c.q_len = 900;
  c.extra = 1100;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  const SparseIndex groups = build(input, problem.params, small(2), pictures());
  const SparseIndex pairs = build(input, problem.params, small(3), pictures());
  for (std::int64_t h = 0; h < c.q_heads; ++h) {
    const std::vector<std::uint8_t> less = explicit_mask(input, problem.params, 0, h, &groups);
    const std::vector<std::uint8_t> more = explicit_mask(input, problem.params, 0, h, &pairs);
    std::int64_t lost = 0;
    for (std::size_t i = 0; i < less.size(); ++i) lost += less[i] > more[i] ? 1 : 0;
    // Offsets are summed per modality of the keys, so that single ones may change their rank.
    EXPECT_LT(static_cast<double>(lost), 0.02 * static_cast<double>(less.size()));
    EXPECT_TRUE(std::includes(pairs.head(0, h).columns.begin(), pairs.head(0, h).columns.end(),
                              groups.head(0, h).columns.begin(), groups.head(0, h).columns.end()));
  }
}

TEST(ModalityBudgets, EveryRowKeepsItsOwnKey) {
  for (const std::int64_t extra : {0, 1, 63, 640, 1500}) {
    Case c;
    c.q_len = 500;
    c.extra = extra;
    c.dim = c.v_dim = 16;
    const Problem problem = make_problem(c);
    const AttentionInput input = problem.input();
    for (const double kind : kKinds) {
      MethodOptions options = small(kind);
      options["vertical_size"] = options["slash_size"] = options["n_init"] = 0;
      options["n_local"] = 1;
      const SparseIndex index = build(input, problem.params, options, pictures());
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        const std::vector<std::uint8_t> kept = explicit_mask(input, problem.params, 0, h, &index);
        for (std::int64_t row = 0; row < c.q_len; ++row) {
          ASSERT_EQ(kept[row * (c.q_len + extra) + extra + row], 1) << kind << ", row " << row;
        }
      }
    }
  }
}

// Short prompts, in which nothing is left out; also pictures at either end and of single tokens.
TEST(ModalityBudgets, LargerThanTheTextAreDense) {
  for (std::int64_t length = 1; length <= 70; ++length) {
    Case c;
    c.q_len = length;
    c.extra = 0;
    c.dim = c.v_dim = 8;
    const Problem problem = make_problem(c);
    for (const double kind : kKinds) {
      for (const std::vector<Segment>& segments : {std::vector<Segment>{{0, 1, Modality::kVisual}},
                                                   {{length - 1, length + 3, Modality::kVisual}},
                                                   {{0, length, Modality::kVisual, 1}}}) {
        const SparseIndex index =
            build(problem.input(), problem.params, {{"kind", kind}}, segments);
        for (const HeadIndex& head : index.heads) {
          EXPECT_EQ(head.kind, HeadIndex::Kind::kDense) << kind << ", " << length;
        }
      }
    }
  }
}

TEST(ModalityIndices, DoNotDependOnThreadsOrNeighbours) {
  Case c;
  c.batch = 3;
  c.lengths = Lengths::kRagged;
  c.q_len = 1200;
  c.extra = 900;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  for (const double kind : kKinds) {
    const SparseIndex index = build(problem.input(), problem.params, small(kind), pictures(), 1);
    const SparseIndex threads = build(problem.input(), problem.params, small(kind), pictures(), 5);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      const AttentionInput alone =
          part_of(problem.input(), b, 0, problem.q_lens[b], problem.kv_lens[b]);
      const SparseIndex expected = build(alone, problem.params, small(kind), pictures());
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        for (const HeadIndex& head : {threads.head(b, h), expected.head(0, h)}) {
          EXPECT_EQ(index.head(b, h).kind, head.kind) << kind;
          EXPECT_EQ(index.head(b, h).columns, head.columns) << kind;
          EXPECT_EQ(index.head(b, h).runs.size(), head.runs.size()) << kind;
          EXPECT_EQ(index.head(b, h).block_ids, head.block_ids) << kind;
        }
      }
    }
  }
}

// Broken activations must not become broken memory accesses.
TEST(ModalityIndices, AreWellFormedWhateverTheValues) {
  for (const float value : kBrokenValues) {
    Case c;
    c.q_len = 500;
    c.extra = 800;
    c.dim = c.v_dim = 16;
    const Problem problem = make_broken_problem(c, value);
    for (const double kind : kKinds) {
      const SparseIndex index = build(problem.input(), problem.params, small(kind), pictures());
      EXPECT_NO_THROW(validate(index, 1, c.q_heads, c.q_len, c.q_len + c.extra)) << kind;
    }
  }
}

}  // namespace
}  // namespace minference::test

// auto: the mass table and its coverings against fp64, and what the method makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "attention/reference/reference.h"
#include "index/coverage.h"
#include "index/covering.h"
#include "minference/error.h"
#include "minference/guard.h"
#include "minference/method.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

// Coverings whatever they cost, on every chunk and for all of its rows.
const MethodOptions kAlways{{"min_keys", 0}, {"max_cost", 1000}, {"last_rows", 0}};

SparseIndex build(const Problem& problem, MethodOptions options,
                  const MethodContext& context = {}) {
  for (const auto& [name, value] : kAlways) options.insert({name, value});
  const Method& method = find_method("auto");
  return method.build_index(problem.input(), problem.params, resolve_options(method, options),
                            context);
}

MethodContext with(MethodState& state) {
  MethodContext context;
  context.state = &state;
  return context;
}

std::vector<MassTable> tables_of(const Problem& problem, std::int64_t rows) {
  const AttentionInput input = problem.input();
  std::vector<MassTable> tables(input.q.batch() * input.q.heads());
  const std::vector<std::uint8_t> wanted(tables.size(), 1);
  estimate_coverage(input, problem.params, rows, wanted, [&](const MassTable& table) {
    tables[table.b * input.q.heads() + table.h] = table;
  });
  return tables;
}

// The cheapest one that holds at least `share`.
Covering covering_of(const MassTable& table, double share, const KeyCosts& costs) {
  const std::vector<Covering> all = coverings(table, costs);
  return *std::find_if(all.begin(), all.end() - 1,
                       [&](const Covering& covering) { return covering.share >= share; });
}

// Probabilities of the sampled rows, [rows][kv_len], and the rows' positions.
struct Sampled {
  std::vector<std::vector<double>> p;
  std::vector<std::int64_t> row;
};

Sampled sample(const Problem& problem, std::int64_t b, std::int64_t h, std::int64_t rows) {
  const AttentionInput input = problem.input();
  const std::int64_t q_len = query_length(input, b);
  rows = std::min(rows, q_len);
  Sampled result;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = q_len * (2 * i + 1) / (2 * rows);
    result.p.push_back(row_probabilities(input, problem.params, b, h, row));
    result.row.push_back(row);
  }
  return result;
}

double mass_beyond_sinks(const Sampled& sampled) {
  double total = 0;
  for (const std::vector<double>& p : sampled.p) {
    for (std::size_t key = MassTable::kSinks; key < p.size(); ++key) total += p[key];
  }
  return total;
}

void expect_table(const Case& c, std::int64_t rows) {
  SCOPED_TRACE(describe(c) + ", sampled rows " + std::to_string(rows));
  const Problem problem = make_problem(c);
  const AttentionInput input = problem.input();
  const std::vector<MassTable> tables = tables_of(problem, rows);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const std::int64_t kv_len = key_length(input, b);
    const std::int64_t first = kv_len - query_length(input, b);
    for (std::int64_t h = 0; h < c.q_heads; ++h) {
      const MassTable& table = tables[b * c.q_heads + h];
      if (query_length(input, b) == 0 || kv_len == 0) {
        EXPECT_EQ(table.kv_len, 0);
        continue;
      }
      const Sampled sampled = sample(problem, b, h, rows);
      EXPECT_NEAR(table.total, mass_beyond_sinks(sampled), 1e-3);
      const double mean = table.total / static_cast<double>(kv_len);
      std::vector<int> class_of(kv_len, 0);
      for (const MassTable::Column& column : table.columns) {
        class_of[column.key] = column.weight_class;
      }
      std::vector<double> by_distance(table.by_distance.size(), 0.0);
      EXPECT_EQ(table.width, first % 32 == 0 ? 2 : 3);
      for (std::int64_t key = 0; key < kv_len; ++key) {
        double mass = 0;
        for (std::size_t i = 0; i < sampled.p.size(); ++i) {
          const double p = sampled.p[i][key];
          mass += p;
          if (p == 0 || key < MassTable::kSinks) continue;
          const std::int64_t block = first + sampled.row[i] / 64 * 64;
          const auto granule = static_cast<std::int64_t>(std::floor(block / 32.0));
          const std::int64_t distance = granule - key / 32;
          by_distance[class_of[key] * table.distances + distance + table.width - 1] += p;
        }
        if (key < kRunGranule) {
          EXPECT_EQ(class_of[key], MassTable::kClasses - 1) << key;
        } else if (class_of[key] == 0) {
          EXPECT_LT(mass, 2.001 * mean) << key;
        } else {
          EXPECT_GT(mass, 0.999 * mean * std::exp2(class_of[key])) << key;
        }
      }
      for (std::size_t i = 0; i < by_distance.size(); ++i) {
        EXPECT_NEAR(table.by_distance[i], by_distance[i], 1e-3) << i;
      }
    }
  }
}

TEST(MassTable, IsTheSoftmaxOfTheSampledRows) {
  Case c;
  c.q_len = 150;
  c.extra = 333;
  c.q_heads = 6;
  c.kv_heads = 2;
  expect_table(c, 32);
  expect_table(c, 64);
  c.extra = 0;
  expect_table(c, 7);
  c.q_len = 20;
  c.extra = 100;
  expect_table(c, 32);
}

TEST(MassTable, BatchesPagesWindowsAndRowsThatSeeNothing) {
  Case c;
  c.batch = 3;
  c.q_len = 50;
  c.extra = 100;
  c.lengths = Lengths::kRagged;
  c.page_size = 16;
  expect_table(c, 16);
  c.lengths = Lengths::kFull;
  c.window = 70;
  expect_table(c, 16);
  c.window = 0;
  c.soft_cap = 3;
  expect_table(c, 16);
  c.extra = -20;
  expect_table(c, 50);
}

// Nothing is heavy where the sinks have all mass.
TEST(MassTable, NoKeyIsHeavyWhereTheSinksTakeAllMass) {
  Case c;
  c.q_len = 64;
  c.extra = 64;
  c.dim = c.v_dim = 16;
  Problem problem = make_problem(c);
  for (std::int64_t h = 0; h < c.kv_heads; ++h) problem.k.set(0, 0, h, 0, 1000);
  for (std::int64_t t = 0; t < c.q_len; ++t) {
    for (std::int64_t h = 0; h < c.q_heads; ++h) problem.q.set(0, t, h, 0, 10);
  }
  for (const MassTable& table : tables_of(problem, 64)) {
    EXPECT_EQ(table.total, 0.0);
    ASSERT_FALSE(table.columns.empty());
    EXPECT_LT(table.columns.back().key, kRunGranule);
    EXPECT_EQ(covering_of(table, 0.95, {}).share, 1.0);
  }
}

// What a covering says it holds of the sampled rows, its index does hold.
TEST(Coverings, HoldTheirShare) {
  for (const std::int64_t extra : {0, 37, 1000}) {
    Case c;
    c.q_len = 192;  // whole row blocks
    c.extra = extra;
    c.q_heads = 3;
    c.kv_heads = 1;
    const Problem problem = make_problem(c);
    const AttentionInput input = problem.input();
    const std::int64_t kv_len = c.q_len + extra;
    for (const MassTable& table : tables_of(problem, 32)) {
      const Sampled sampled = sample(problem, 0, table.h, 32);
      double least_cost = 0;
      for (const double share : {0.0, 0.3, 0.8, 0.95, 0.999, 1.0}) {
        SCOPED_TRACE("extra " + std::to_string(extra) + ", share " + std::to_string(share));
        const KeyCosts costs{1.0, 1.3};
        const Covering covering = covering_of(table, share, costs);
        EXPECT_GE(covering.share, share - 1e-4);
        const double cost = covering.run_keys + 1.3 * covering.column_keys;
        EXPECT_GE(cost, least_cost);  // more is never cheaper
        least_cost = cost;

        SparseIndex index{1, c.q_heads, {}, 0.0};
        index.heads.resize(c.q_heads);
        index.head(0, table.h) = covering.head(table);
        validate(index, 1, c.q_heads, c.q_len, kv_len);
        const std::vector<std::uint8_t> mask =
            explicit_mask(input, problem.params, 0, table.h, &index);
        double kept = 0;
        for (std::size_t i = 0; i < sampled.p.size(); ++i) {
          const std::int64_t row = sampled.row[i];
          EXPECT_NE(mask[row * kv_len + extra + row], 0) << "its own key, row " << row;
          for (std::int64_t key = MassTable::kSinks; key < kv_len; ++key) {
            if (mask[row * kv_len + key] != 0) kept += sampled.p[i][key];
          }
        }
        EXPECT_GE(kept, (covering.share - 1e-4) * mass_beyond_sinks(sampled));
      }
    }
  }
}

TEST(Coverings, HoldMoreForMore) {
  Case c;
  c.q_len = 192;
  c.extra = 1000;
  for (const MassTable& table : tables_of(make_problem(c), 32)) {
    const KeyCosts costs{1.0, 1.3};
    const std::vector<Covering> all = coverings(table, costs);
    EXPECT_NEAR(all.back().share, 1.0, 1e-4);
    for (std::size_t i = 1; i < all.size(); ++i) {
      EXPECT_GT(all[i].share, all[i - 1].share);
      EXPECT_GT(all[i].run_keys + 1.3 * all[i].column_keys,
                all[i - 1].run_keys + 1.3 * all[i - 1].column_keys);
    }
  }
}

// Two heads that only one form suits.
TEST(Coverings, ChooseTheCheaperForm) {
  MassTable table;
  table.q_len = 2048;
  table.kv_len = 8192;
  table.width = 2;
  table.distances = table.kv_len / kRunGranule + table.width;
  table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
  table.total = 32;
  table.columns = {{1000, 31.0F, MassTable::kClasses - 1}};
  table.by_distance[(MassTable::kClasses - 1) * table.distances + 100] = 16;
  table.by_distance[(MassTable::kClasses - 1) * table.distances + 150] = 15;
  table.by_distance[0] = 1;
  Covering covering = covering_of(table, 0.95, {1, 1});
  EXPECT_EQ(covering.head(table).runs.size(), 1U);
  EXPECT_EQ(covering.head(table).columns, std::vector<std::int64_t>{1000});

  // The same mass on a diagonal, by keys that are barely heavy.
  table.columns.clear();
  table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
  for (std::int64_t i = 0; i < 320; ++i) table.columns.push_back({2000 + i, 0.1F, 1});
  table.by_distance[table.distances + 100] = 32;
  covering = covering_of(table, 0.95, {1, 1});
  EXPECT_TRUE(covering.head(table).columns.empty());
  // Index 100 is distance 99; what comes with it is a neighbour that a run cannot leave out.
  const std::vector<OffsetRun> runs = covering.head(table).runs;
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_TRUE(runs[1].contains(99 * 32) || runs[1].contains(100 * 32));
  EXPECT_EQ(runs[1].end - runs[1].begin, 1);
}

// With every row sampled nothing is left to chance.
TEST(Auto, HeadsHoldTheirCoverageInTheMean) {
  Case c;
  c.q_len = 64;
  c.extra = 900;
  c.q_heads = 6;
  c.kv_heads = 2;
  const Problem problem = make_problem(c);
  for (const double coverage : {0.0, 0.5, 0.9, 0.95, 1.0}) {
    const SparseIndex index =
        build(problem, {{"coverage", coverage}, {"estimate_rows", 64}, {"long_keys", 1}});
    double sum = 0;
    for (const double recall : mass_recall(problem.input(), problem.params, index, 64)) {
      EXPECT_GE(recall, 1 - 3 * (1 - coverage) - 1e-3);
      sum += recall;
    }
    EXPECT_GE(sum / 6, coverage - 1e-3);
    if (coverage == 0.0) {
      const Result result = make_result(problem.input(), DType::kF32, Layout::kPacked);
      const Stats stats = attention(problem.input(), problem.params, result.output(), &index);
      EXPECT_LT(stats.kept_fraction(), 0.35);
    }
  }
}

// Prompts that are shorter than long_keys lose less, in proportion, down to 0.4 of it.
TEST(Auto, ShortPromptsLoseLess) {
  Case c;
  c.q_len = 64;
  c.extra = 900;
  const Problem problem = make_problem(c);
  double last = 0;
  for (const auto& [long_keys, factor] : {std::pair{1.0, 1.0}, {1928.0, 0.5}, {1e6, 0.4}}) {
    const SparseIndex index =
        build(problem, {{"coverage", 0.6}, {"estimate_rows", 64}, {"long_keys", long_keys}});
    double sum = 0;
    for (const double recall : mass_recall(problem.input(), problem.params, index, 64)) {
      sum += recall;
    }
    EXPECT_GE(sum / 4, 1 - 0.4 * factor - 1e-3);
    EXPECT_GT(sum, last);
    last = sum;
  }
}

TEST(Auto, ShortOrExpensiveHeadsAreDense) {
  Case c;
  c.q_len = 200;
  c.extra = 700;
  const Problem problem = make_problem(c);
  for (const MethodOptions& options :
       {MethodOptions{{"min_keys", 1024}}, MethodOptions{{"max_cost", 0}}}) {
    const SparseIndex index = build(problem, options);
    for (const HeadIndex& head : index.heads) EXPECT_EQ(head.kind, HeadIndex::Kind::kDense);
  }
}

// The prompt's end sees every key; a chunk that may be any part of it spends little on that.
TEST(Auto, LastRowsOfThePromptSeeEveryKey) {
  Case c;
  c.batch = 2;
  c.q_len = 1024;
  c.extra = 100;
  c.dim = c.v_dim = 16;
  const Problem problem = make_problem(c);
  const auto exact_rows = [&](double last_rows, std::vector<std::int64_t> after) {
    MethodContext context;
    context.rows_after = after;
    const SparseIndex index = build(problem, {{"last_rows", last_rows}}, context);
    std::vector<std::int64_t> rows;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      EXPECT_EQ(index.head(b, 0).kind, HeadIndex::Kind::kDiagonal);
      EXPECT_EQ(index.head(b, c.q_heads - 1).dense_last_rows, index.head(b, 0).dense_last_rows);
      rows.push_back(index.head(b, 0).dense_last_rows);
    }
    return rows;
  };
  using Rows = std::vector<std::int64_t>;
  EXPECT_EQ(exact_rows(64, {0, 0}), (Rows{64, 64}));
  EXPECT_EQ(exact_rows(64, {63, 64}), (Rows{1, 0}));
  EXPECT_EQ(exact_rows(64, {}), (Rows{32, 32}));  // one in 32
  EXPECT_EQ(exact_rows(20, {}), (Rows{20, 20}));
  EXPECT_EQ(exact_rows(0, {0, 0}), (Rows{0, 0}));
  EXPECT_THROW(exact_rows(64, {0}), InvalidArgument);
  EXPECT_THROW(exact_rows(64, {0, -1}), InvalidArgument);
}

bool same(const HeadIndex& a, const HeadIndex& b) {
  return a.kind == b.kind && a.columns == b.columns && a.runs.size() == b.runs.size() &&
         std::equal(a.runs.begin(), a.runs.end(), b.runs.begin(),
                    [](const OffsetRun& x, const OffsetRun& y) {
                      return x.begin == y.begin && x.end == y.end;
                    });
}

// Keys 400 and 900 in turn outweigh all others, for the rows before and after kTurn; all but key 0
// where that is a sink, which takes about 95 % of the mass.
class Turning {
 public:
  static constexpr std::int64_t kTurn = 1600;

  explicit Turning(bool sink = false) {
    Case c;
    c.q_len = 2400;
    c.extra = 0;
    c.q_heads = 2;
    c.kv_heads = 1;
    c.dim = c.v_dim = 16;
    problem_ = make_problem(c);
    for (std::int64_t row = 0; row < c.q_len; ++row) {
      for (std::int64_t h = 0; h < c.q_heads; ++h) {
        problem_.q.set(0, row, h, 0, row < kTurn ? 4.0F : 0.0F);
        problem_.q.set(0, row, h, 1, row < kTurn ? 0.0F : 4.0F);
        problem_.q.set(0, row, h, 2, 4.0F);
      }
    }
    problem_.k.set(0, 400, 0, 0, 30);
    problem_.k.set(0, 900, 0, 1, 30);
    for (std::int64_t key = 0; key < c.q_len; ++key) problem_.k.set(0, key, 0, 2, 0);
    if (sink) problem_.k.set(0, 0, 0, 2, 33);
  }

  // Rows [begin, begin + rows) with the keys up to the last of them.
  SparseIndex build(std::int64_t begin, std::int64_t rows, double share_rows, MethodState& state,
                    double last_rows = 0, std::span<const std::int64_t> rows_after = {}) {
    const AttentionInput input = part_of(problem_.input(), 0, begin, rows, begin + rows);
    const Method& method = find_method("auto");
    MethodOptions options = kAlways;
    options["share_rows"] = share_rows;
    options["last_rows"] = last_rows;
    MethodContext context = with(state);
    context.rows_after = rows_after;
    return method.build_index(input, problem_.params, resolve_options(method, options), context);
  }

 private:
  Problem problem_;
};

bool has_column(const HeadIndex& head, std::int64_t key) {
  return std::binary_search(head.columns.begin(), head.columns.end(), key);
}

TEST(Auto, KeepsAnIndexWhileItHolds) {
  Turning prompt;
  MethodState state;
  const SparseIndex first = prompt.build(1200, 100, 1000, state);
  ASSERT_TRUE(has_column(first.head(0, 0), 400));
  EXPECT_TRUE(same(prompt.build(1300, 100, 1000, state).head(0, 0), first.head(0, 0)));
  EXPECT_TRUE(same(prompt.build(1400, 200, 1000, state).head(0, 0), first.head(0, 0)));
  // Rows of another kind: what holds no longer is replaced at once.
  const SparseIndex turned = prompt.build(Turning::kTurn, 100, 1000, state);
  EXPECT_TRUE(has_column(turned.head(0, 0), 900));
  EXPECT_FALSE(has_column(turned.head(0, 0), 400));
}

// Sinks count as little in the check as in the estimate: all that the index loses is 5 % of the mass.
TEST(Auto, TheCheckLeavesSinksOut) {
  Turning prompt(true);
  MethodState state;
  const SparseIndex first = prompt.build(1200, 100, 1000, state);
  ASSERT_TRUE(has_column(first.head(0, 0), 400));
  ASSERT_FALSE(has_column(first.head(0, 0), 900));
  EXPECT_TRUE(same(prompt.build(1300, 100, 1000, state).head(0, 0), first.head(0, 0)));
  EXPECT_TRUE(has_column(prompt.build(Turning::kTurn, 100, 1000, state).head(0, 0), 900));
}

TEST(Auto, EstimatesAnewAfterItsRowsAndForANewPrompt) {
  Turning prompt;
  MethodState state;
  const SparseIndex first = prompt.build(1200, 100, 200, state);
  EXPECT_TRUE(same(prompt.build(1300, 100, 200, state).head(0, 0), first.head(0, 0)));
  EXPECT_EQ(state.next_estimate, (std::vector<std::int64_t>{1500, 1500}));
  prompt.build(1400, 100, 200, state);
  EXPECT_EQ(state.next_estimate, (std::vector<std::int64_t>{1700, 1700}));
  MethodState fresh;
  const SparseIndex again = prompt.build(1200, 100, 200, state);
  EXPECT_TRUE(same(again.head(0, 0), prompt.build(1200, 100, 200, fresh).head(0, 0)));
  EXPECT_EQ(state.next_estimate, fresh.next_estimate);
}

TEST(Auto, TakesUpTheStateOfAnotherMethod) {
  Case c;
  c.q_len = 100;
  c.extra = 0;
  MethodState state;
  MethodContext context;
  context.state = &state;
  const Problem first = make_problem(c);
  const Method& method = find_method("vertical_slash");
  method.build_index(first.input(), first.params, resolve_options(method, {}), context);
  c.extra = 100;
  const Problem next = make_problem(c);
  const SparseIndex index = build(next, {}, with(state));
  EXPECT_TRUE(same(index.head(0, 0), build(next, {}).head(0, 0)));
}

TEST(Auto, RefusesTheStateOfOthers) {
  Case c;
  c.q_len = 100;
  c.extra = 100;
  c.q_heads = 4;
  c.kv_heads = 2;
  MethodState state;
  build(make_problem(c), {}, with(state));
  c.q_heads = 6;
  try {
    build(make_problem(c), {}, with(state));
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("4 query heads; the input has 1 of 6"), std::string::npos)
        << e.what();
  }
}

// What is remembered of a chunk holds for the next one, but not how many of its rows were the last.
TEST(Auto, RemembersNoLastRows) {
  Turning prompt;
  MethodState state;
  const std::int64_t more[] = {1100};
  const std::int64_t none[] = {0};
  const HeadIndex first = prompt.build(1200, 100, 1000, state, 64, more).head(0, 0);
  const HeadIndex last = prompt.build(1300, 100, 1000, state, 64, none).head(0, 0);
  EXPECT_TRUE(same(first, last));
  EXPECT_EQ(first.dense_last_rows, 0);
  EXPECT_EQ(last.dense_last_rows, 64);
  EXPECT_EQ(prompt.build(1400, 100, 1000, state, 64, more).head(0, 0).dense_last_rows, 0);
}

}  // namespace
}  // namespace minference::test

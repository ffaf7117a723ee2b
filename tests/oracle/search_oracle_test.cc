// The pattern search: what it says of a candidate is what the method minference does with it, and
// heads of a known kind get that kind.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "attention/reference/reference.h"
#include "minference/method.h"
#include "minference/search.h"
#include "search/chunk_scores.h"
#include "support/problem.h"
#include "support/views.h"

namespace minference::test {
namespace {

using Kind = HeadPattern::Kind;

// Every pair costs the same.
constexpr SearchCosts kPairs{1, 1, 1, 1, 1};

// What one candidate keeps of a head, by the definitions: the index of the method minference for
// it, and attention over that index in doubles.
struct Expected {
  double recall = 0;
  double error = 0;
  double norm = 0;
  std::int64_t kept_pairs = 0;
};

Expected expected_of(const Problem& problem, std::int64_t h, const HeadPattern& pattern) {
  const AttentionInput input = problem.input();
  PatternFile file(1);
  file.set(0, h, pattern);
  const Method& method = find_method("minference");
  MethodContext context;
  context.patterns = &file;
  const SparseIndex index =
      method.build_index(input, problem.params, resolve_options(method, {}), context);
  const std::vector<std::uint8_t> all = explicit_mask(input, problem.params, 0, h, nullptr);
  const std::vector<std::uint8_t> kept = explicit_mask(input, problem.params, 0, h, &index);
  const std::int64_t kv_len = key_length(input, 0);
  const std::int64_t dim = input.v.dim();
  const std::int64_t kv_head = h / (input.q.heads() / input.k.heads());
  Expected expected;
  for (std::int64_t row = 0; row < input.q.tokens(); ++row) {
    const std::vector<double> scores = row_scores(input, problem.params, 0, h, row);
    double sums[2] = {};
    std::vector<double> outputs[2] = {std::vector<double>(dim), std::vector<double>(dim)};
    for (std::int64_t key = 0; key < kv_len; ++key) {
      if (all[row * kv_len + key] == 0) continue;
      const bool in_index = kept[row * kv_len + key] != 0;
      expected.kept_pairs += in_index ? 1 : 0;
      for (int sparse = 0; sparse <= (in_index ? 1 : 0); ++sparse) {
        sums[sparse] += std::exp(scores[key]);
        for (std::int64_t d = 0; d < dim; ++d) {
          outputs[sparse][d] += std::exp(scores[key]) * problem.v.get(0, key, kv_head, d);
        }
      }
    }
    expected.recall += sums[1] / sums[0];
    for (std::int64_t d = 0; d < dim; ++d) {
      const double dense = outputs[0][d] / sums[0];
      expected.norm += dense * dense;
      expected.error += std::pow(outputs[1][d] / sums[1] - dense, 2);
    }
  }
  return expected;
}

// Every 29th candidate of two heads, all rows sampled.
void expect_as_method(const Case& c, std::int64_t tokens) {
  SCOPED_TRACE(describe(c));
  const Problem problem = make_problem(c);
  const std::vector<CandidateGrid> grids = candidate_grids(tokens);
  std::int64_t count = 0;
  for (const CandidateGrid& grid : grids) count += grid.size();
  std::vector<HeadTotals> heads(c.q_heads);
  for (HeadTotals& head : heads) head.candidates.resize(count);
  add_chunk_scores(problem.input(), problem.params, grids, c.q_len, heads);
  for (std::int64_t h = 0; h < c.q_heads; h += 3) {
    std::int64_t candidate = 0;
    for (const CandidateGrid& grid : grids) {
      for (std::int64_t i = 0; i < grid.size(); ++i, ++candidate) {
        if (candidate % 29 != h && candidate + 1 != count) continue;
        const HeadPattern pattern = grid.pattern(i);
        const Expected expected = expected_of(problem, h, pattern);
        const CandidateTotals& totals = heads[h].candidates[candidate];
        const double pairs = totals.run_pairs + totals.column_pairs + totals.dense_pairs;
        SCOPED_TRACE("head " + std::to_string(h) + ", kind " +
                     std::to_string(static_cast<int>(pattern.kind)) + ", vertical " +
                     std::to_string(pattern.vertical) + ", slash " + std::to_string(pattern.slash));
        EXPECT_EQ(std::llround(pairs), expected.kept_pairs);
        EXPECT_NEAR(totals.recall, expected.recall, 1e-3);
        EXPECT_NEAR(heads[h].norm, expected.norm, 1e-3 * expected.norm);
        EXPECT_NEAR(totals.error, expected.error, 1e-3 * expected.norm);
      }
    }
    EXPECT_EQ(heads[h].rows, static_cast<double>(c.q_len));
  }
}

Case chunk_case() {
  Case c;
  c.q_len = 64;
  c.extra = 704;
  c.q_heads = 4;
  c.kv_heads = 2;
  c.dim = c.v_dim = 32;
  return c;
}

TEST(Search, CandidatesAreMeasuredAsTheMethodRunsThem) {
  expect_as_method(chunk_case(), 2048);
  Case first = chunk_case();  // a first chunk: many candidates are dense
  first.extra = 0;
  expect_as_method(first, 2048);
}

TEST(Search, OddSizesWindowsAndCapsToo) {
  Case c = chunk_case();
  c.q_len = 50;
  c.extra = 411;
  c.v_dim = 20;
  c.layout = Layout::kPaddedRows;
  c.window = 300;
  expect_as_method(c, 1024);
  c.window = 0;
  c.soft_cap = 5;
  expect_as_method(c, 1024);
}

// One prompt whose heads attend as `score` says: q.k of a pair of positions, up to a constant, is
// the product of the features of both.
class Prompt {
 public:
  using Feature = std::function<void(std::int64_t position, std::int64_t head, TensorData& tensor)>;

  Prompt(std::int64_t tokens, std::int64_t heads, std::int64_t dim, const Feature& query,
         const Feature& key)
      : tokens_(tokens),
        q_({1, tokens, heads, dim}, DType::kF32, Layout::kPacked),
        k_({1, tokens, heads, dim}, DType::kF32, Layout::kPacked),
        v_({1, tokens, heads, dim}, DType::kF32, Layout::kPacked) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dim; ++d) {
          q_.set(0, t, h, d, 0);
          k_.set(0, t, h, d, 0);
          v_.set(0, t, h, d, normal(random));
        }
        query(t, h, q_);
        key(t, h, k_);
      }
    }
    all_.q = q_.view();
    all_.k = k_.view();
    all_.v = v_.view();
    params_.scale = 1;
  }

  std::int64_t tokens() const { return tokens_; }

  // Feeds chunks [begin, end) of `size` rows to layer 0. Returns how many were new.
  int feed(PatternSearch& search, std::int64_t size, std::int64_t begin, std::int64_t end,
           int threads = 2) const {
    int added = 0;
    AttentionParams params = params_;
    params.threads = threads;
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      const AttentionInput part = part_of(all_, 0, chunk * size, size, (chunk + 1) * size);
      added += search.add_chunk(0, part, params) ? 1 : 0;
    }
    return added;
  }

 private:
  std::int64_t tokens_;
  TensorData q_;
  TensorData k_;
  TensorData v_;
  AttentionInput all_;
  AttentionParams params_;
};

// Head 0: near keys and the first ones. Head 1: a column every 97 keys. Head 2: one offset in 1000.
// Head 3: everything alike.
Prompt known_heads() {
  constexpr double kPi = 3.14159265358979323846;
  const auto turn = [=](std::int64_t t, std::int64_t h, TensorData& tensor, float size) {
    // Waves of several lengths: their product is large for near positions only or, where all are
    // parts of one length, for offsets that are its multiples.
    for (int d = 0; d < 7; ++d) {
      const double length = h == 2 ? 1000.0 / (1 << d) : 600.0 + 140.0 * d;
      const double angle = 2 * kPi * static_cast<double>(t) / length;
      tensor.set(0, t, h, 2 * d, size * static_cast<float>(std::cos(angle)));
      tensor.set(0, t, h, 2 * d + 1, size * static_cast<float>(std::sin(angle)));
    }
  };
  const auto feature = [=](bool query) {
    return [=](std::int64_t t, std::int64_t h, TensorData& tensor) {
      if (h == 0 || h == 2) turn(t, h, tensor, h == 0 ? 2.0F : 3.0F);
      if (h == 0) tensor.set(0, t, h, 15, query ? 1.0F : (t < 4 ? 24.0F : 0.0F));
      if (h == 1) tensor.set(0, t, h, 0, query ? 1.0F : (t % 97 == 5 ? 9.0F : 0.0F));
    };
  };
  return {4096, 4, 16, feature(true), feature(false)};
}

TEST(Search, HeadsGetTheKindThatTheyAre) {
  const Prompt prompt = known_heads();
  PatternSearch search(1, 4, prompt.tokens(), 16);
  EXPECT_EQ(prompt.feed(search, 1024, 0, 4), 4);
  // Where an estimate alone would cost more, only the A-shape is left, and it serves its head.
  const HeadChoice near = search.choose(kPairs, 0.12, BudgetShare::kShared)[0];
  EXPECT_EQ(near.pattern.kind, Kind::kAShape);
  EXPECT_GT(near.recall, 0.8);
  const std::vector<HeadChoice> choices = search.choose(kPairs, 0.35, BudgetShare::kEqual);
  ASSERT_EQ(choices.size(), 4U);
  EXPECT_EQ(choices[1].pattern.kind, Kind::kVerticalSlash);
  EXPECT_EQ(choices[2].pattern.kind, Kind::kVerticalSlash);
  // Columns for the head of columns, diagonals for the other.
  EXPECT_LT(choices[1].pattern.slash, 300);
  EXPECT_LT(choices[2].pattern.vertical, choices[1].pattern.vertical);
  EXPECT_GT(choices[1].recall, 0.9);
  EXPECT_GT(choices[2].recall, 0.7);
  EXPECT_LT(choices[3].recall, 0.6);
}

// Row blocks attend to the key blocks of one of 16 groups, another one each time: no column and no
// diagonal lasts, and 100 blocks hold a group. They pay once a prompt is longer than these.
TEST(Search, ABlockHeadIsBlockSparse) {
  const auto group = [](std::int64_t block) { return (block * block * 5 + block / 3) % 16; };
  const Prompt prompt(
      16384, 1, 16,
      [&](std::int64_t t, std::int64_t h, TensorData& q) { q.set(0, t, h, group(t / 64), 1); },
      [&](std::int64_t t, std::int64_t h, TensorData& k) {
        k.set(0, t, h, group((t / 64) * 7 + 3), 12);
      });
  PatternSearch search(1, 1, prompt.tokens(), 4);
  prompt.feed(search, 4096, 0, 4);
  const std::vector<HeadChoice> choices = search.choose(kPairs, 0.7, BudgetShare::kShared);
  ASSERT_EQ(choices.size(), 1U);
  EXPECT_EQ(choices[0].pattern.kind, Kind::kBlockSparse);
  EXPECT_GT(choices[0].recall, 0.99);
  EXPECT_GT(choices[0].pattern.score, 0.95);
  // A smaller budget does not buy it.
  EXPECT_NE(search.choose(kPairs, 0.2, BudgetShare::kShared)[0].pattern.kind, Kind::kBlockSparse);
}

double total_cost(const std::vector<HeadChoice>& choices) {
  double sum = 0;
  for (const HeadChoice& choice : choices) sum += choice.cost;
  return sum;
}

double total_score(const std::vector<HeadChoice>& choices) {
  double sum = 0;
  for (const HeadChoice& choice : choices) sum += choice.pattern.score;
  return sum;
}

TEST(Search, BudgetsAreKeptAndMoreKeepsMore) {
  const Prompt prompt = known_heads();
  PatternSearch search(1, 4, prompt.tokens(), 8);
  prompt.feed(search, 1024, 0, 4);
  SearchCosts costs;
  costs.columns = 1.5;
  costs.window = 0.9;
  double last = 0;
  for (const double budget : {0.25, 0.3, 0.5, 0.8, 1.0}) {
    SCOPED_TRACE(budget);
    const std::vector<HeadChoice> shared = search.choose(costs, budget, BudgetShare::kShared);
    const std::vector<HeadChoice> equal = search.choose(costs, budget, BudgetShare::kEqual);
    EXPECT_LE(total_cost(shared), 4 * budget + 1e-9);
    for (const HeadChoice& choice : equal) EXPECT_LE(choice.cost, budget);
    EXPECT_GE(total_score(shared), last);
    last = total_score(shared);
  }
  EXPECT_NEAR(last, 4.0, 1e-3);
  // Sharing serves heads of unlike needs better than equal parts.
  EXPECT_GT(total_score(search.choose(costs, 0.3, BudgetShare::kShared)),
            total_score(search.choose(costs, 0.3, BudgetShare::kEqual)));
}

TEST(Search, ThreadsAndInterruptionsChangeNothing) {
  const Prompt prompt = known_heads();
  PatternSearch whole(1, 4, prompt.tokens(), 8);
  prompt.feed(whole, 1024, 0, 4, 1);
  PatternSearch begun(1, 4, prompt.tokens(), 8);
  prompt.feed(begun, 1024, 0, 2, 3);
  const std::string saved = begun.state("test");
  PatternSearch resumed(1, 4, prompt.tokens(), 8);
  resumed.restore(saved, "test");
  EXPECT_EQ(prompt.feed(resumed, 1024, 0, 4, 3), 2);
  EXPECT_EQ(resumed.state("test"), whole.state("test"));
}

}  // namespace
}  // namespace minference::test

// The pattern search: spending a budget, saved states, refusals.
#include "minference/search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "index/allocate.h"
#include "minference/error.h"
#include "search/candidates.h"

namespace minference {
namespace {

// The most that any selection of one offer a head is worth.
double best_value(std::span<const std::vector<Offer>> heads, double budget) {
  if (budget < 0) return -1e9;
  if (heads.empty()) return 0;
  double best = -1e9;
  for (const Offer& offer : heads[0]) {
    best = std::max(best, offer.value + best_value(heads.subspan(1), budget - offer.cost));
  }
  return best;
}

TEST(ShareBudget, IsOptimalButForOneStep) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<Offer>> heads(4);
    double least = 0;
    for (std::vector<Offer>& offers : heads) {
      for (int i = 0; i < 6; ++i) offers.push_back({uniform(random), uniform(random)});
      double cheapest = 1;
      for (const Offer& offer : offers) cheapest = std::min(cheapest, offer.cost);
      least += cheapest;
    }
    const double budget = least + uniform(random);
    const std::vector<std::int64_t> chosen = share_budget(heads, budget);
    ASSERT_EQ(chosen.size(), heads.size());
    double cost = 0;
    double value = 0;
    for (std::size_t h = 0; h < heads.size(); ++h) {
      cost += heads[h][chosen[h]].cost;
      value += heads[h][chosen[h]].value;
    }
    EXPECT_LE(cost, budget);
    EXPECT_GE(value, best_value(heads, budget) - 1.0);
    EXPECT_LE(value, best_value(heads, budget) + 1e-12);
  }
}

TEST(ShareBudget, TakesTheBestStepsFirst) {
  // Head 0 gains little, head 1 much, for the same cost.
  const std::vector<std::vector<Offer>> heads = {{{0.1, 0.9}, {0.6, 0.95}},
                                                 {{0.1, 0.2}, {0.6, 0.9}}};
  EXPECT_EQ(share_budget(heads, 0.7), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(share_budget(heads, 1.2), (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(share_budget(heads, 0.2), (std::vector<std::int64_t>{0, 0}));
  EXPECT_TRUE(share_budget(heads, 0.19).empty());
}

TEST(ShareBudget, SkipsOffersThatAreWorseAndDearer) {
  const std::vector<std::vector<Offer>> heads = {{{0.5, 0.5}, {0.4, 0.7}, {0.9, 0.6}, {0.4, 0.7}}};
  EXPECT_EQ(share_budget(heads, 1.0), std::vector<std::int64_t>{1});
}

TEST(BestWithin, TakesTheMostValuableThenTheCheapest) {
  const std::vector<Offer> offers = {{0.5, 0.8}, {0.3, 0.8}, {0.9, 0.9}, {0.3, 0.8}};
  EXPECT_EQ(best_within(offers, 0.6), 1);
  EXPECT_EQ(best_within(offers, 1.0), 2);
  EXPECT_EQ(best_within(offers, 0.2), -1);
}

TEST(Candidates, CoverBudgetsUpToEverything) {
  for (const std::int64_t tokens : {1024, 8192, 131072, 1 << 20}) {
    std::vector<HeadPattern::Kind> kinds;
    for (const CandidateGrid& grid : candidate_grids(tokens)) {
      kinds.push_back(grid.kind);
      EXPECT_TRUE(std::is_sorted(grid.vertical.begin(), grid.vertical.end()));
      EXPECT_TRUE(std::is_sorted(grid.slash.begin(), grid.slash.end()));
      EXPECT_LT(grid.vertical.size(), 255U);  // levels are bytes
      EXPECT_LT(grid.slash.size(), 255U);
      EXPECT_EQ(grid.pattern(grid.size() - 1).slash, grid.slash.back());
      EXPECT_EQ(grid.pattern(grid.size() - 1).vertical, grid.vertical.back());
      if (grid.kind == HeadPattern::Kind::kVerticalSlash) {
        EXPECT_EQ(grid.slash.back(), tokens);
      }
    }
    EXPECT_EQ(kinds, (std::vector{HeadPattern::Kind::kVerticalSlash, HeadPattern::Kind::kAShape,
                                  HeadPattern::Kind::kBlockSparse}));
  }
}

// Expects that `body` throws InvalidArgument with a message that contains `words`.
template <class Body>
void expect_refused(Body&& body, const std::string& words) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << words;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(PatternSearch, RefusesSizes) {
  expect_refused([] { PatternSearch(0, 1, 1024, 16); }, "layers is 0");
  expect_refused([] { PatternSearch(1, 0, 1024, 16); }, "q_heads is 0");
  expect_refused([] { PatternSearch(1, 1, 1023, 16); }, "tokens is 1023; legal: 1024");
  expect_refused([] { PatternSearch(1, 1, 1024, 0); }, "rows is 0; legal: 1 to 64");
  expect_refused([] { PatternSearch(1, 1, 1024, 65); }, "rows is 65");
  expect_refused([] { measure_search_costs(0, 1); }, "head_dim is 0");
}

// A search that has seen the first 512 rows of a prompt without content.
class BegunSearch : public testing::Test {
 protected:
  void SetUp() override { search_.add_chunk(0, input(512, 512), {}); }

  AttentionInput input(std::int64_t rows, std::int64_t keys, std::int64_t heads = 2) {
    AttentionInput result;
    result.q = TensorView::contiguous(data_.data(), DType::kF32, {1, rows, heads, 16});
    result.k = TensorView::contiguous(data_.data(), DType::kF32, {1, keys, 1, 16});
    result.v = TensorView::contiguous(data_.data(), DType::kF32, {1, keys, 1, 16});
    return result;
  }

  std::vector<float> data_ = std::vector<float>(1100 * 2 * 16);
  PatternSearch search_{2, 2, 1024, 4};
};

TEST_F(BegunSearch, RefusesChunks) {
  expect_refused([&] { search_.add_chunk(2, input(512, 512), {}); }, "layer is 2; legal: 0 to 1");
  expect_refused([&] { search_.add_chunk(0, input(640, 1024), {}); },
                 "rows 384 to 1024; legal: from 512");
  expect_refused([&] { search_.add_chunk(0, input(576, 1088), {}); }, "to 1024");
  expect_refused([&] { search_.add_chunk(0, input(512, 1024, 3), {}); }, "3 query heads; legal: 2");
  AttentionParams all;
  all.causal = false;
  expect_refused([&] { search_.add_chunk(0, input(512, 1024), all); }, "causal");
  EXPECT_FALSE(search_.add_chunk(0, input(512, 512), {}));
  EXPECT_TRUE(search_.add_chunk(0, input(512, 1024), {}));
  // Hosts compute some chunks by other means, the first and short ones.
  EXPECT_TRUE(search_.add_chunk(1, input(256, 1024), {}));
}

TEST_F(BegunSearch, RefusesBudgets) {
  const auto choose = [&](double budget) {
    return search_.choose({}, budget, BudgetShare::kShared);
  };
  expect_refused([&] { choose(0); }, "the budget is 0.000000; legal: 0.");
  expect_refused([&] { choose(-1); }, "to 1");
  expect_refused([&] { choose(1.5); }, "to 1");
  expect_refused([&] { choose(std::nan("")); }, "to 1");
  expect_refused([&] { search_.choose({}, 0.001, BudgetShare::kEqual); }, "legal: 0.");
  // The layer without a chunk is left out.
  const std::vector<HeadChoice> choices = choose(1.0);
  ASSERT_EQ(choices.size(), 2U);
  EXPECT_EQ(choices[1].layer, 0);
  EXPECT_EQ(choices[1].head, 1);
  EXPECT_TRUE(PatternSearch(2, 2, 1024, 4).choose({}, 0.5, BudgetShare::kShared).empty());
}

TEST_F(BegunSearch, RefusesStatesOfOthers) {
  const std::string state = search_.state("one");
  PatternSearch other(2, 2, 1024, 4);
  other.restore(state, "one");
  EXPECT_EQ(other.state("one"), state);
  expect_refused([&] { other.restore(state, "two"); }, "another search");
  expect_refused([&] { other.restore("", "one"); }, "another search");
  expect_refused([&] { other.restore("no state at all", "one"); }, "another search");
  expect_refused([&] { other.restore(state.substr(0, state.size() - 1), "one"); }, "incomplete");
  expect_refused([&] { other.restore(state + "x", "one"); }, "incomplete");
  expect_refused([&] { PatternSearch(2, 2, 1024, 5).restore(state, "one"); }, "another search");
  expect_refused([&] { PatternSearch(2, 3, 1024, 4).restore(state, "one"); }, "another search");
  EXPECT_EQ(other.state("one"), state);
}

}  // namespace
}  // namespace minference

#include "index/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace minference {
namespace {

using Positions = std::vector<std::int64_t>;

TEST(TopK, PositionsOfTheLargestAscending) {
  const std::vector<float> values = {3, 9, 1, 7, 5};
  EXPECT_EQ(top_k(values, 1), (Positions{1}));
  EXPECT_EQ(top_k(values, 3), (Positions{1, 3, 4}));
  EXPECT_EQ(top_k(values, 5), (Positions{0, 1, 2, 3, 4}));
}

TEST(TopK, CountsAreClamped) {
  const std::vector<float> values = {3, 9};
  EXPECT_EQ(top_k(values, 0), Positions{});
  EXPECT_EQ(top_k(values, -4), Positions{});
  EXPECT_EQ(top_k(values, 1000000), (Positions{0, 1}));
  EXPECT_EQ(top_k({}, 3), Positions{});
}

TEST(TopK, EarlierPositionsWinTies) {
  const std::vector<float> values = {1, 2, 2, 2, 0, 2};
  EXPECT_EQ(top_k(values, 2), (Positions{1, 2}));
  EXPECT_EQ(top_k(values, 5), (Positions{0, 1, 2, 3, 5}));
  EXPECT_EQ(top_k(std::vector<float>(70, 0.5F), 3), (Positions{0, 1, 2}));
}

TEST(TopK, NaNIsSmallerThanEverything) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {nan, -1e30F, nan, 5};
  EXPECT_EQ(top_k(values, 2), (Positions{1, 3}));
  EXPECT_EQ(top_k(values, 4), (Positions{0, 1, 2, 3}));
}

TEST(TopK, AgreesWithAStableSort) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<float> values(1 + random() % 200);
    for (float& value : values) value = static_cast<float>(random() % 20);  // many ties
    const auto k = static_cast<std::int64_t>(random() % (values.size() + 1));
    Positions expected(values.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(),
                     [&](std::int64_t a, std::int64_t b) { return values[a] > values[b]; });
    expected.resize(k);
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(top_k(values, k), expected);
  }
}

TEST(Descending, IsAStableSort) {
  std::mt19937 random(12);
  for (int round = 0; round < 100; ++round) {
    std::vector<float> values(random() % 200);
    for (float& value : values) {
      value = std::ldexp(static_cast<float>(random() % 20) - 9, static_cast<int>(random() % 60));
    }
    Positions expected(values.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(),
                     [&](std::int64_t a, std::int64_t b) { return values[a] > values[b]; });
    EXPECT_EQ(descending(values), expected);
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(descending(std::vector<float>{nan, -0.0F, 0.0F, -1, 2}), (Positions{4, 1, 2, 3, 0}));
}

constexpr std::int64_t kNoLimit = 1000;

TEST(SmallestCover, TakesTheHeaviestUntilTheShareIsReached) {
  const std::vector<double> mass = {1, 4, 0, 3, 2};
  EXPECT_EQ(smallest_cover(mass, {}, 0, 0, kNoLimit), Positions{});
  EXPECT_EQ(smallest_cover(mass, {}, 0.4, 0, kNoLimit), Positions{1});
  EXPECT_EQ(smallest_cover(mass, {}, 0.41, 0, kNoLimit), (Positions{1, 3}));
  EXPECT_EQ(smallest_cover(mass, {}, 0.9, 0, kNoLimit), (Positions{1, 3, 4}));
  EXPECT_EQ(smallest_cover(mass, {}, 1, 0, kNoLimit), (Positions{0, 1, 3, 4}));
}

TEST(SmallestCover, ForcedPositionsComeFirstAndCount) {
  const std::vector<double> mass = {1, 4, 0, 3, 2};
  const Positions forced = {2, 4};
  EXPECT_EQ(smallest_cover(mass, forced, 0.2, 0, kNoLimit), (Positions{2, 4}));
  EXPECT_EQ(smallest_cover(mass, forced, 0.5, 0, kNoLimit), (Positions{1, 2, 4}));
  EXPECT_EQ(smallest_cover(mass, forced, 1, 0, 3), (Positions{1, 2, 4}));
  EXPECT_EQ(smallest_cover(mass, forced, 1, 0, 1), (Positions{2, 4}));
}

TEST(SmallestCover, CountsAreBounded) {
  const std::vector<double> mass = {1, 4, 0, 3, 2};
  EXPECT_EQ(smallest_cover(mass, {}, 0, 2, kNoLimit), (Positions{1, 3}));
  EXPECT_EQ(smallest_cover(mass, {}, 1, 0, 2), (Positions{1, 3}));
  EXPECT_EQ(smallest_cover(mass, {}, 0, 9, kNoLimit), (Positions{0, 1, 2, 3, 4}));
  EXPECT_EQ(smallest_cover({}, {}, 1, 3, kNoLimit), Positions{});
}

TEST(SmallestCover, EarlierPositionsWinTiesAndNaNIsNothing) {
  EXPECT_EQ(smallest_cover(std::vector<double>(8, 0.5), {}, 0.5, 0, kNoLimit),
            (Positions{0, 1, 2, 3}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(smallest_cover(std::vector<double>{nan, 1, nan, 3}, {}, 0.9, 0, kNoLimit),
            (Positions{1, 3}));
}

}  // namespace
}  // namespace minference

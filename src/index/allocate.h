// Which of several offers each head takes, so that what all spend together is well spent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace minference {

struct Offer {
  double cost = 0;
  double value = 0;
};

// From one offer of a head to a dearer one.
struct Step {
  double slope = 0;  // value for its cost
  double cost = 0;
  std::size_t head = 0;
  std::int64_t offer = 0;
};

// Where every head begins, its cheapest offer, and all steps up the heads' concave hulls (the offers
// that bring most value for their cost), those of most value for their cost first. Steps of one head
// stay in order; ties go to the earlier head and offer.
struct Ascent {
  std::vector<std::int64_t> start;  // [heads]
  std::vector<Step> steps;
};
Ascent ascent(std::span<const std::vector<Offer>> heads);

// Which offer every head takes, so that the values sum to much and the costs to at most `budget`: the
// steps of ascent() that fit. Optimal but for the last step that does not. Empty when the cheapest
// offers exceed the budget.
std::vector<std::int64_t> share_budget(std::span<const std::vector<Offer>> heads, double budget);

// The offer of most value whose cost is at most `budget`; of equal values the cheaper, then the
// earlier one. -1 when there is none.
std::int64_t best_within(std::span<const Offer> offers, double budget);

}  // namespace minference

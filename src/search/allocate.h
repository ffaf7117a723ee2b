// Spends a budget on one candidate per head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace minference {

struct Offer {
  double cost = 0;
  double value = 0;
};

// Which offer every head takes, so that the values sum to much and the costs to at most `budget`:
// every head begins with its cheapest offer, and the steps up its concave hull that bring most
// value for their cost are taken first. Optimal but for the last step that does not fit. Empty when
// the cheapest offers exceed the budget. Ties go to the earlier head and offer.
std::vector<std::int64_t> share_budget(std::span<const std::vector<Offer>> heads, double budget);

// The offer of most value whose cost is at most `budget`; of equal values the cheaper, then the
// earlier one. -1 when there is none.
std::int64_t best_within(std::span<const Offer> offers, double budget);

}  // namespace minference

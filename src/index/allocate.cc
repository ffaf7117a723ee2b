#include "index/allocate.h"

#include <algorithm>

namespace minference {
namespace {

bool cheaper(const Offer& a, const Offer& b) {
  return a.cost != b.cost ? a.cost < b.cost : a.value > b.value;
}

// Offers from the cheapest on, each of more value than those before it and of less value per cost:
// the upper concave hull.
std::vector<std::int64_t> hull(std::span<const Offer> offers) {
  std::vector<std::int64_t> order(offers.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return cheaper(offers[a], offers[b]); });
  const auto slope = [&](std::int64_t from, std::int64_t to) {
    return (offers[to].value - offers[from].value) / (offers[to].cost - offers[from].cost);
  };
  std::vector<std::int64_t> kept;
  for (const std::int64_t i : order) {
    if (!kept.empty() && offers[i].value <= offers[kept.back()].value) continue;
    while (kept.size() >= 2 && slope(kept.back(), i) >= slope(kept[kept.size() - 2], kept.back())) {
      kept.pop_back();
    }
    kept.push_back(i);
  }
  return kept;
}

}  // namespace

Ascent ascent(std::span<const std::vector<Offer>> heads) {
  Ascent all;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const std::vector<std::int64_t> kept = hull(heads[h]);
    all.start.push_back(kept.front());
    for (std::size_t i = 1; i < kept.size(); ++i) {
      const Offer& from = heads[h][kept[i - 1]];
      const Offer& to = heads[h][kept[i]];
      const double cost = to.cost - from.cost;
      all.steps.push_back({(to.value - from.value) / cost, cost, h, kept[i]});
    }
  }
  // Along one hull slopes fall, so the steps of a head stay in order.
  std::stable_sort(all.steps.begin(), all.steps.end(),
                   [](const Step& a, const Step& b) { return a.slope > b.slope; });
  return all;
}

std::vector<std::int64_t> share_budget(std::span<const std::vector<Offer>> heads, double budget) {
  const Ascent all = ascent(heads);
  std::vector<std::int64_t> chosen = all.start;
  double spent = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) spent += heads[h][chosen[h]].cost;
  if (spent > budget) return {};
  std::vector<std::uint8_t> stopped(heads.size(), 0);
  for (const Step& step : all.steps) {
    if (stopped[step.head] != 0) continue;
    if (spent + step.cost > budget) {
      stopped[step.head] = 1;
      continue;
    }
    spent += step.cost;
    chosen[step.head] = step.offer;
  }
  return chosen;
}

std::int64_t best_within(std::span<const Offer> offers, double budget) {
  std::int64_t best = -1;
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const Offer& offer = offers[i];
    if (offer.cost > budget) continue;
    if (best < 0 || offer.value > offers[best].value ||
        (offer.value == offers[best].value && offer.cost < offers[best].cost)) {
      best = static_cast<std::int64_t>(i);
    }
  }
  return best;
}

}  // namespace minference

#include "explain/figures.h"

#include <algorithm>
#include <charconv>
#include <tuple>

#include "attention/kept_pairs.h"
#include "minference/error.h"
#include "minference/guard.h"

namespace minference::explain {
namespace {

std::string name_of(const HeadId& id) {
  return std::to_string(id.layer) + ":" + std::to_string(id.head);
}

HeadId parse_head(const std::string& text) {
  HeadId id;
  const char* end = text.data() + text.size();
  const auto layer = std::from_chars(text.data(), end, id.layer);
  if (layer.ec == std::errc() && layer.ptr != end && *layer.ptr == ':') {
    const auto head = std::from_chars(layer.ptr + 1, end, id.head);
    if (head.ec == std::errc() && head.ptr == end && id.layer >= 0 && id.head >= 0) return id;
  }
  throw InvalidArgument("'" + text + "' is not a head; expected layer:head, for example 3:5");
}

void check_list(const std::vector<HeadId>& heads) {
  for (auto head = heads.begin(); head != heads.end(); ++head) {
    if (std::find(heads.begin(), head, *head) != head) {
      throw InvalidArgument("head " + name_of(*head) + " is given twice");
    }
  }
  if (static_cast<std::int64_t>(heads.size()) > kMaxShownHeads) {
    throw InvalidArgument(std::to_string(heads.size()) + " heads; legal: 1 to " +
                          std::to_string(kMaxShownHeads));
  }
}

void add_to(HeadFigures& sum, const HeadFigures& figures) {
  sum.kept_pairs += figures.kept_pairs;
  sum.causal_pairs += figures.causal_pairs;
  sum.recall_sum += figures.recall_sum;
  sum.steps += figures.steps;
  for (std::size_t kind = 0; kind < sum.pairs_of_kind.size(); ++kind) {
    sum.steps_of_kind[kind] += figures.steps_of_kind[kind];
    sum.pairs_of_kind[kind] += figures.pairs_of_kind[kind];
  }
}

}  // namespace

std::vector<HeadId> parse_heads(const std::string& text) {
  std::vector<HeadId> heads;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    heads.push_back(parse_head(text.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  check_list(heads);
  return heads;
}

void check_heads(const std::vector<HeadId>& heads, std::int64_t layers,
                 std::int64_t heads_per_layer) {
  check_list(heads);
  for (const HeadId& id : heads) {
    if (id.layer >= 0 && id.layer < layers && id.head >= 0 && id.head < heads_per_layer) continue;
    throw InvalidArgument("the model has no head " + name_of(id) + "; legal: layers 0 to " +
                          std::to_string(layers - 1) + ", heads 0 to " +
                          std::to_string(heads_per_layer - 1));
  }
}

double HeadFigures::kept_fraction() const {
  return causal_pairs > 0 ? static_cast<double>(kept_pairs) / static_cast<double>(causal_pairs)
                          : 1.0;
}

HeadIndex::Kind HeadFigures::kind() const {
  const auto largest = std::max_element(pairs_of_kind.begin(), pairs_of_kind.end());
  return static_cast<HeadIndex::Kind>(largest - pairs_of_kind.begin());
}

const char* kind_name(HeadIndex::Kind kind) {
  switch (kind) {
    case HeadIndex::Kind::kDense:
      return "dense";
    case HeadIndex::Kind::kDiagonal:
      return "diagonal";
    case HeadIndex::Kind::kBlock:
      break;
  }
  return "blocks";
}

AttentionFigures::AttentionFigures(std::int64_t layers, std::int64_t heads)
    : layers_(layers), heads_(heads), figures_(static_cast<std::size_t>(layers * heads)) {}

void AttentionFigures::add(const AttentionCall& call, std::int64_t rows) {
  const AttentionInput& input = *call.input;
  if (call.layer < 0 || call.layer >= layers_ || input.q.heads() > heads_) return;
  const std::vector<std::int64_t> kept = kept_pairs(input, *call.params, call.index);
  const std::int64_t causal = kept_pairs(input, *call.params, nullptr)[0];
  std::vector<double> recall(kept.size(), 1.0);
  if (call.index != nullptr) {
    GuardOptions guard;
    guard.rows = rows;
    recall = mass_recall(input, *call.params, *call.index, guard_rows(guard, input.q.tokens()));
  }
  for (std::int64_t h = 0; h < input.q.heads(); ++h) {
    const auto kind = static_cast<std::size_t>(call.index == nullptr ? HeadIndex::Kind::kDense
                                                                     : call.index->head(0, h).kind);
    HeadFigures& figures = figures_[call.layer * heads_ + h];
    figures.kept_pairs += kept[h];
    figures.causal_pairs += causal;
    figures.recall_sum += recall[h];
    figures.steps += 1;
    figures.steps_of_kind[kind] += 1;
    figures.pairs_of_kind[kind] += causal;
  }
}

HeadFigures AttentionFigures::layer(std::int64_t layer) const {
  HeadFigures sum;
  for (std::int64_t h = 0; h < heads_; ++h) add_to(sum, at({layer, h}));
  return sum;
}

HeadId AttentionFigures::worst(std::int64_t layer) const {
  HeadId worst{layer, 0};
  for (std::int64_t head = 1; head < heads_; ++head) {
    if (at({layer, head}).recall() < at(worst).recall()) worst.head = head;
  }
  return worst;
}

HeadFigures AttentionFigures::total() const {
  HeadFigures sum;
  for (const HeadFigures& figures : figures_) add_to(sum, figures);
  return sum;
}

std::vector<HeadId> AttentionFigures::by_recall() const {
  std::vector<HeadId> ids;
  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    for (std::int64_t head = 0; head < heads_; ++head) {
      if (at({layer, head}).steps > 0) ids.push_back({layer, head});
    }
  }
  std::stable_sort(ids.begin(), ids.end(), [this](const HeadId& a, const HeadId& b) {
    const HeadFigures& left = at(a);
    const HeadFigures& right = at(b);
    return std::tuple(left.recall(), left.kept_fraction()) <
           std::tuple(right.recall(), right.kept_fraction());
  });
  return ids;
}

std::vector<HeadId> AttentionFigures::telling_heads() const {
  constexpr std::size_t kWorst = 4;
  constexpr std::size_t kTypical = 4;
  std::vector<HeadId> ids = by_recall();
  if (ids.size() <= kWorst + kTypical) return ids;
  // Heads that were dense throughout lost nothing and show nothing but their attention.
  const auto sparse_end = std::find_if(ids.begin(), ids.end(), [this](const HeadId& id) {
    const HeadFigures& figures = at(id);
    return figures.kept_pairs == figures.causal_pairs;
  });
  const auto sparse = static_cast<std::size_t>(sparse_end - ids.begin());
  const std::size_t pool = sparse > kWorst + kTypical ? sparse : ids.size();
  std::vector<HeadId> heads(ids.begin(), ids.begin() + kWorst);
  for (std::size_t i = 1; i <= kTypical; ++i) {
    heads.push_back(ids[kWorst + (pool - kWorst) * i / (kTypical + 1)]);
  }
  return heads;
}

}  // namespace minference::explain

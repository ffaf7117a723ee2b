// What `explain` collects of every attention head during a prefill, and which heads it shows.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "explain/attention_call.h"
#include "minference/sparse_index.h"

namespace minference::explain {

struct HeadId {
  std::int64_t layer = 0;
  std::int64_t head = 0;

  auto operator<=>(const HeadId&) const = default;
};

// Most heads of which one report shows maps; one map takes 1 MiB.
inline constexpr std::int64_t kMaxShownHeads = 32;

// "layer:head,layer:head,...". Throws InvalidArgument naming what is not such a pair, a head that
// is given twice, and more than kMaxShownHeads.
std::vector<HeadId> parse_heads(const std::string& text);

// Throws InvalidArgument naming the first head that such a model does not have, and as parse_heads()
// does for heads that are given twice or too many.
void check_heads(const std::vector<HeadId>& heads, std::int64_t layers,
                 std::int64_t heads_per_layer);

// Sums over the prefill steps of one head.
struct HeadFigures {
  std::int64_t kept_pairs = 0;
  std::int64_t causal_pairs = 0;
  double recall_sum = 0;
  std::int64_t steps = 0;                       // 0: not one call was seen
  std::array<std::int64_t, 3> steps_of_kind{};  // by HeadIndex::Kind
  std::array<std::int64_t, 3> pairs_of_kind{};  // causal pairs, by HeadIndex::Kind

  double kept_fraction() const;
  double recall() const { return steps > 0 ? recall_sum / static_cast<double>(steps) : 1.0; }
  // The kind that served the largest part of the causal area.
  HeadIndex::Kind kind() const;
};

const char* kind_name(HeadIndex::Kind kind);

class AttentionFigures {
 public:
  AttentionFigures() = default;
  AttentionFigures(std::int64_t layers, std::int64_t heads);

  // Adds a call; recall is measured as a guard of `rows` rows does. Calls whose layer is not known, and
  // layers or heads that the model should not have, are left out.
  void add(const AttentionCall& call, std::int64_t rows);

  std::int64_t layers() const { return layers_; }
  std::int64_t heads() const { return heads_; }
  const HeadFigures& at(const HeadId& id) const { return figures_[id.layer * heads_ + id.head]; }
  // Sum over the heads of a layer.
  HeadFigures layer(std::int64_t layer) const;
  // The head of a layer with the lowest recall.
  HeadId worst(std::int64_t layer) const;
  // Sum over all heads.
  HeadFigures total() const;

  // Heads that were seen, lowest recall first; equal ones with the fewest kept first.
  std::vector<HeadId> by_recall() const;
  // The heads with the lowest recall, and typical ones, for a report of moderate length.
  std::vector<HeadId> telling_heads() const;

 private:
  std::int64_t layers_ = 0;
  std::int64_t heads_ = 0;
  std::vector<HeadFigures> figures_;  // [layers][heads]
};

}  // namespace minference::explain

#include "minference/search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention/validate.h"
#include "attention/visible_keys.h"
#include "index/allocate.h"
#include "minference/error.h"
#include "search/candidates.h"
#include "search/chunk_scores.h"

namespace minference {
namespace {

// First bytes of a state; the digit changes with what follows them.
constexpr char kStateMark[] = "minference search state 1\n";

std::int64_t check(const char* what, std::int64_t value, std::int64_t min, std::int64_t max) {
  if (value < min || value > max) {
    throw InvalidArgument(std::string(what) + " is " + std::to_string(value) +
                          "; legal: " + std::to_string(min) + " to " + std::to_string(max));
  }
  return value;
}

double pair_cost(const SearchCosts& costs, HeadPattern::Kind kind, const CandidateTotals& totals) {
  switch (kind) {
    case HeadPattern::Kind::kAShape:
      return totals.dense_pairs + costs.window * (totals.run_pairs + totals.column_pairs);
    case HeadPattern::Kind::kBlockSparse:
      return totals.dense_pairs + costs.blocks * totals.run_pairs;
    case HeadPattern::Kind::kVerticalSlash:
      break;
  }
  return totals.dense_pairs + costs.runs * totals.run_pairs + costs.columns * totals.column_pairs +
         costs.estimate * totals.estimate_pairs;
}

// Four decimals: what a reader of a pattern file wants to see.
double rounded(double value) { return std::round(value * 1e4) / 1e4; }

double score(const HeadTotals& head, const CandidateTotals& candidate) {
  if (head.norm <= 0) return candidate.recall / head.rows;
  return std::max(0.0, 1.0 - std::sqrt(candidate.error / head.norm));
}

template <class T>
void append(std::string& bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

template <class T>
bool take(const std::string& bytes, std::size_t& at, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() - at < sizeof(T)) return false;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  at += sizeof(T);
  return true;
}

}  // namespace

struct PatternSearch::Totals {
  std::int64_t layers = 0;
  std::int64_t q_heads = 0;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;
  std::vector<CandidateGrid> grids;
  std::vector<std::int64_t> done;  // [layers] rows of the prompt up to the last one added
  std::vector<HeadTotals> heads;   // [layers][q_heads]

  std::int64_t candidates() const {
    std::int64_t count = 0;
    for (const CandidateGrid& grid : grids) count += grid.size();
    return count;
  }

  // Grid of a candidate, and its number in that grid.
  std::pair<const CandidateGrid*, std::int64_t> find(std::int64_t candidate) const {
    const CandidateGrid* grid = grids.data();
    while (candidate >= grid->size()) candidate -= (grid++)->size();
    return {grid, candidate};
  }

  std::string header(const std::string& purpose) const {
    std::string bytes = kStateMark;
    for (const std::int64_t size : {layers, q_heads, tokens, rows, candidates()})
      append(bytes, size);
    append(bytes, static_cast<std::int64_t>(purpose.size()));
    return bytes + purpose;
  }
};

PatternSearch::PatternSearch(std::int64_t layers, std::int64_t q_heads, std::int64_t tokens,
                             std::int64_t rows)
    : totals_(std::make_unique<Totals>()) {
  totals_->layers = check("layers", layers, 1, 1 << 20);
  totals_->q_heads = check("q_heads", q_heads, 1, 1 << 20);
  totals_->tokens = check("tokens", tokens, kMinSearchTokens, std::int64_t{1} << 31);
  totals_->rows = check("rows", rows, 1, kMaxSearchRows);
  totals_->grids = candidate_grids(tokens);
  totals_->done.resize(layers);
  totals_->heads.resize(layers * q_heads);
  for (HeadTotals& head : totals_->heads) head.candidates.resize(totals_->candidates());
}

PatternSearch::~PatternSearch() = default;
PatternSearch::PatternSearch(PatternSearch&&) noexcept = default;

std::int64_t PatternSearch::candidates() const { return totals_->candidates(); }

bool PatternSearch::add_chunk(std::int64_t layer, const AttentionInput& input,
                              const AttentionParams& params) {
  Totals& totals = *totals_;
  check("layer", layer, 0, totals.layers - 1);
  validate_input(input, params);
  const std::string where = "layer " + std::to_string(layer);
  if (input.q.batch() != 1 || !params.causal || !input.mask.empty()) {
    throw InvalidArgument(where + ": a search takes one causal sequence without a mask");
  }
  if (input.q.heads() != totals.q_heads) {
    throw InvalidArgument(where + " has " + std::to_string(input.q.heads()) +
                          " query heads; legal: " + std::to_string(totals.q_heads));
  }
  const SequenceGeometry geometry(input, params, 0);
  std::int64_t& done = totals.done[layer];
  if (geometry.kv_len <= done) return false;
  const std::int64_t begin = geometry.kv_len - geometry.q_len;
  if (begin < done || geometry.kv_len > totals.tokens) {
    throw InvalidArgument(where + ": the chunk is of rows " + std::to_string(begin) + " to " +
                          std::to_string(geometry.kv_len) + "; legal: from " +
                          std::to_string(done) + ", to " + std::to_string(totals.tokens));
  }
  add_chunk_scores(input, params, totals.grids, totals.rows,
                   std::span(totals.heads).subspan(layer * totals.q_heads, totals.q_heads));
  done = geometry.kv_len;
  return true;
}

std::vector<HeadChoice> PatternSearch::choose(const SearchCosts& costs, double budget,
                                              BudgetShare share) const {
  const Totals& totals = *totals_;
  std::vector<std::vector<Offer>> offers;
  std::vector<std::size_t> owners;  // of the offers, in totals.heads
  double least_sum = 0;
  double least_max = 0;
  for (std::size_t h = 0; h < totals.heads.size(); ++h) {
    const HeadTotals& head = totals.heads[h];
    if (head.rows == 0) continue;
    owners.push_back(h);
    std::vector<Offer>& own = offers.emplace_back();
    double least = INFINITY;
    for (std::int64_t c = 0; c < totals.candidates(); ++c) {
      const CandidateTotals& candidate = head.candidates[c];
      own.push_back({pair_cost(costs, totals.find(c).first->kind, candidate) / head.causal_pairs,
                     score(head, candidate)});
      least = std::min(least, own.back().cost);
    }
    least_sum += least;
    least_max = std::max(least_max, least);
  }
  if (owners.empty()) return {};
  std::vector<std::int64_t> chosen;
  const auto count = static_cast<double>(owners.size());
  const double least = share == BudgetShare::kShared ? least_sum / count : least_max;
  if (!(budget >= least && budget <= 1.0)) {
    throw InvalidArgument("the budget is " + std::to_string(budget) +
                          "; legal: " + std::to_string(least) + " to 1");
  }
  if (share == BudgetShare::kShared) {
    chosen = share_budget(offers, budget * count);
  } else {
    for (const std::vector<Offer>& own : offers) chosen.push_back(best_within(own, budget));
  }
  std::vector<HeadChoice> choices;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    const HeadTotals& head = totals.heads[owners[i]];
    const CandidateTotals& candidate = head.candidates[chosen[i]];
    HeadChoice& choice = choices.emplace_back();
    choice.layer = static_cast<std::int64_t>(owners[i]) / totals.q_heads;
    choice.head = static_cast<std::int64_t>(owners[i]) % totals.q_heads;
    const auto [grid, number] = totals.find(chosen[i]);
    choice.pattern = grid->pattern(number);
    choice.pattern.score = rounded(score(head, candidate));
    choice.recall = candidate.recall / head.rows;
    choice.cost = offers[i][chosen[i]].cost;
    choice.kept =
        (candidate.dense_pairs + candidate.run_pairs + candidate.column_pairs) / head.causal_pairs;
  }
  return choices;
}

std::string PatternSearch::state(const std::string& purpose) const {
  std::string bytes = totals_->header(purpose);
  for (const std::int64_t done : totals_->done) append(bytes, done);
  for (const HeadTotals& head : totals_->heads) {
    for (const double value : {head.rows, head.norm, head.causal_pairs}) append(bytes, value);
    for (const CandidateTotals& candidate : head.candidates) append(bytes, candidate);
  }
  return bytes;
}

void PatternSearch::restore(const std::string& state, const std::string& purpose) {
  const std::string header = totals_->header(purpose);
  if (state.compare(0, header.size(), header) != 0) {
    throw InvalidArgument("the saved state is of another search");
  }
  std::size_t at = header.size();
  bool whole = true;
  Totals restored = *totals_;
  for (std::int64_t& done : restored.done) whole = whole && take(state, at, done);
  for (HeadTotals& head : restored.heads) {
    for (double* value : {&head.rows, &head.norm, &head.causal_pairs}) {
      whole = whole && take(state, at, *value);
    }
    for (CandidateTotals& candidate : head.candidates) whole = whole && take(state, at, candidate);
  }
  if (!whole || at != state.size()) throw InvalidArgument("the saved state is incomplete");
  *totals_ = std::move(restored);
}

}  // namespace minference

// Pattern search: which pattern serves each attention head best, measured on one real prompt.
//
// For every chunk of the prompt and every head, each candidate pattern is applied as the method
// minference would apply it, and what it loses is measured on sampled rows. choose() then buys
// patterns for a budget. Source: MInference (arXiv 2407.02490) §3.3, kernel-aware search.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "minference/attention.h"
#include "minference/pattern.h"

namespace minference {

// Shortest prompt that a search takes, in tokens.
inline constexpr std::int64_t kMinSearchTokens = 1024;
// Query rows that can be sampled of a chunk.
inline constexpr std::int64_t kMaxSearchRows = 64;

// Time of one (query, key) pair in each kind of work, in units of a pair of dense attention. The
// defaults were measured with the kernels for AVX512_BF16 on two Zen 5 cores, heads of 64.
struct SearchCosts {
  double runs = 1.25;      // vertical_and_slash: pairs on kept diagonals
  double columns = 1.6;    // vertical_and_slash: pairs in gathered columns
  double window = 1.15;    // stream_llm
  double blocks = 1.35;    // block_sparse, its estimate included
  double estimate = 1.85;  // vertical_and_slash: pairs of the 64 rows of each chunk's estimate
};

// The ratios of this device for heads of this size with f16 keys and values. Takes some seconds.
// Two measurements differ in their last digits: keep one where results must repeat. Throws
// InvalidArgument unless head_dim is 1 to 256.
SearchCosts measure_search_costs(std::int64_t head_dim, int threads);

enum class BudgetShare : std::uint8_t {
  kShared,  // heads that need little get little, so that others get more; as much in all
  kEqual,   // no head costs more than the budget, as in the paper
};

struct HeadChoice {
  std::int64_t layer = 0;
  std::int64_t head = 0;
  HeadPattern pattern;  // score: 1 - relative L2 error of the head's output, at least 0
  double recall = 0;    // share of the attention mass that is kept
  double kept = 0;      // share of the causal area
  double cost = 0;      // share of what dense attention costs
};

class PatternSearch {
 public:
  // For a prompt of `tokens` tokens, of each chunk of which `rows` query rows are sampled. Throws
  // InvalidArgument unless layers and q_heads are positive, tokens at least kMinSearchTokens and
  // rows 1 to kMaxSearchRows.
  PatternSearch(std::int64_t layers, std::int64_t q_heads, std::int64_t tokens, std::int64_t rows);
  ~PatternSearch();
  PatternSearch(PatternSearch&&) noexcept;

  // Measures the candidates on one chunk of a layer: its queries against all keys so far, causal,
  // one sequence. Chunks come in order; rows that none brings take no part. The result does not
  // depend on the number of threads. A chunk that was added before is skipped, so that an
  // interrupted search may be fed from its beginning; returns whether it was new. Throws
  // InvalidArgument when only some of its rows are new or the shape does not fit.
  bool add_chunk(std::int64_t layer, const AttentionInput& input, const AttentionParams& params);

  // The patterns that keep most for at most `budget` times the cost of dense attention, ascending
  // by layer and head; heads that no chunk was added of are left out. Throws InvalidArgument, naming
  // the smallest legal one, unless the budget is at most 1 and buys every head a pattern.
  std::vector<HeadChoice> choose(const SearchCosts& costs, double budget, BudgetShare share) const;

  // All that was measured so far, as bytes, and back. restore() throws InvalidArgument unless
  // `state` is whole and of a search with the same arguments and the same `purpose`, any text.
  std::string state(const std::string& purpose) const;
  void restore(const std::string& state, const std::string& purpose);

  // Patterns that are compared for each head.
  std::int64_t candidates() const;

 private:
  struct Totals;
  std::unique_ptr<Totals> totals_;
};

}  // namespace minference

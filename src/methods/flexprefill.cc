// flexprefill: per head either columns and diagonals of blocks, or a map of pooled scores,
// whichever its last queries follow; as many blocks as hold a share gamma of the mass.
// Source: FlexPrefill (arXiv 2502.20766) §4.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/cpu/kernel_table.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "index/block_grid.h"
#include "index/last_q_blocks.h"
#include "index/pooled.h"
#include "index/top_k.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"
#include "minference/error.h"

namespace minference {
namespace {

struct Rule {
  std::int64_t block_size = 0;
  double gamma = 0;
  double tau = 0;
  std::int64_t min_blocks = 1;
  std::int64_t max_blocks = 0;

  explicit Rule(const MethodOptions& options)
      : block_size(whole_option(options, "block_size")),
        gamma(options.at("gamma")),
        tau(options.at("tau")) {
    const auto least = whole_option(options, "min_budget");
    const auto most = whole_option(options, "max_budget");
    if (most != 0 && most < least) {
      throw InvalidArgument("option max_budget of method flexprefill is " + std::to_string(most) +
                            "; legal: 0 (no limit) or min_budget, " + std::to_string(least) +
                            ", and more");
    }
    min_blocks = std::max<std::int64_t>(blocks(least), 1);
    max_blocks = most == 0 ? kNoLimit : blocks(most);
  }

  // Short texts are dense: there is next to nothing to leave out.
  bool is_dense(std::int64_t kv_len) const {
    return kv_len <= std::max<std::int64_t>(min_blocks, 2) * block_size;
  }

 private:
  static constexpr std::int64_t kNoLimit = std::int64_t{1} << 40;

  std::int64_t blocks(std::int64_t tokens) const { return (tokens + block_size - 1) / block_size; }
};

// Softmax of scores[begin ... end), zero outside.
std::vector<double> softmax(const float* scores, BlockGrid::Range visible, std::int64_t size) {
  std::vector<double> p(size, 0.0);
  if (visible.size() == 0) return p;
  const double maximum = *std::max_element(scores + visible.begin, scores + visible.end);
  double sum = 0.0;
  for (std::int64_t n = visible.begin; n < visible.end; ++n) {
    p[n] = std::exp(scores[n] - maximum);
    sum += p[n];
  }
  for (double& value : p) value /= sum;
  return p;
}

// Square root of the Jensen-Shannon divergence, in nats, of two distributions.
double distance(std::span<const double> p, std::span<const double> q) {
  const auto term = [](double x, double mean) { return x > 0.0 ? x * std::log(x / mean) : 0.0; };
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double mean = (p[i] + q[i]) / 2;
    sum += term(p[i], mean) + term(q[i], mean);
  }
  return std::sqrt(std::max(sum / 2, 0.0));
}

// What the last queries say about a head, in blocks, as a MethodState can keep it: `columns` are key
// blocks and `runs` blocks of offsets, and a head of the kind kBlock is query-aware.
class HeadEstimate {
 public:
  HeadEstimate(const Rule& rule, const BlockGrid& grid, const PooledKeys& pooled,
               PooledKeys::Scratch& scratch)
      : rule_(rule), grid_(grid), pooled_(pooled), scratch_(scratch) {}

  HeadIndex operator()(const LastQBlocks& estimate) const {
    HeadIndex head;
    const bool query_aware = is_query_aware(estimate);
    head.kind = query_aware ? HeadIndex::Kind::kBlock : HeadIndex::Kind::kDiagonal;
    // Columns and diagonals of query-aware heads shrink to the smallest budget.
    const std::int64_t most = query_aware ? rule_.min_blocks : rule_.max_blocks;
    const std::int64_t first[] = {0};
    head.columns = smallest_cover(estimate.columns, first, rule_.gamma, rule_.min_blocks, most);
    for (const std::int64_t s :
         smallest_cover(estimate.diagonals, first, rule_.gamma, rule_.min_blocks, most)) {
      head.runs.push_back({s, s + 1, 1});
    }
    return head;
  }

 private:
  // Whether the pooled scores of the last queries tell where their attention goes.
  bool is_query_aware(const LastQBlocks& estimate) const {
    const SequenceGeometry& geometry = grid_.geometry();
    const std::int64_t first = geometry.q_len - estimate.rows;
    const BlockGrid::Range visible = grid_.visible_from(first, geometry.q_len);
    const PooledKeys::Scores scores = pooled_.scores(estimate.b, estimate.h, first, geometry.q_len,
                                                     estimate.rows, visible.end, scratch_);
    const std::vector<double> estimated = softmax(scores.row(0), visible, grid_.key_blocks());
    std::vector<double> actual(estimate.columns.begin(), estimate.columns.end());
    double total = 0.0;
    for (const double mass : actual) total += mass;
    for (double& mass : actual) mass /= total;
    return distance(estimated, actual) < rule_.tau;
  }

  const Rule& rule_;
  const BlockGrid& grid_;
  const PooledKeys& pooled_;
  PooledKeys::Scratch& scratch_;
};

// The index of query head h from its estimate, which may be one of an earlier chunk.
class HeadBuilder {
 public:
  HeadBuilder(const Rule& rule, const BlockGrid& grid, const PooledKeys& pooled,
              PooledKeys::Scratch& scratch)
      : rule_(rule), grid_(grid), pooled_(pooled), scratch_(scratch), kept_(grid.row_blocks()) {}

  HeadIndex build(std::int64_t b, std::int64_t h, const HeadIndex& estimate,
                  std::int64_t q_tokens) {
    keep_columns(estimate.columns);
    keep_diagonals(estimate.runs);
    if (estimate.kind == HeadIndex::Kind::kBlock) keep_map(b, h);
    for (std::int64_t m = 0; m < grid_.row_blocks(); ++m) {
      std::vector<std::int64_t>& blocks = kept_[m];
      const std::vector<std::int64_t> forced = grid_.forced(m);
      blocks.insert(blocks.end(), forced.begin(), forced.end());
      std::sort(blocks.begin(), blocks.end());
      blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    }
    return block_head(grid_, q_tokens, kept_);
  }

 private:
  void keep_columns(const std::vector<std::int64_t>& columns) {
    for (std::int64_t m = 0; m < grid_.row_blocks(); ++m) {
      const BlockGrid::Range visible = grid_.visible(m);
      for (const std::int64_t n : columns) {
        if (visible.contains(n)) kept_[m].push_back(n);
      }
    }
  }

  // Diagonal s: what lies s blocks behind the row block's own positions, rounded outwards.
  void keep_diagonals(const std::vector<OffsetRun>& diagonals) {
    const SequenceGeometry& geometry = grid_.geometry();
    for (std::int64_t m = 0; m < grid_.row_blocks(); ++m) {
      const std::int64_t first = geometry.position(grid_.first_row(m));
      const std::int64_t last = geometry.position(grid_.end_row(m) - 1);
      for (const OffsetRun& diagonal : diagonals) {
        const std::int64_t behind = diagonal.begin * grid_.size();
        const BlockGrid::Range range = grid_.at_positions(m, first - behind, last - behind);
        for (std::int64_t n = range.begin; n < range.end; ++n) kept_[m].push_back(n);
      }
    }
  }

  // The heaviest entries of the softmax of pooled scores, of all row blocks together.
  void keep_map(std::int64_t b, std::int64_t h) {
    struct Entry {
      std::int64_t m;
      std::int64_t n;
    };
    std::vector<Entry> entries;
    std::vector<double> mass;
    for (std::int64_t first = 0; first < grid_.row_blocks(); first += cpu::kTileRows) {
      const std::int64_t last = std::min(first + cpu::kTileRows, grid_.row_blocks()) - 1;
      const PooledKeys::Scores scores =
          pooled_.scores(b, h, grid_.first_row(first), grid_.end_row(last), grid_.size(),
                         grid_.visible(last).end, scratch_);
      for (std::int64_t m = first; m <= last; ++m) {
        const BlockGrid::Range visible = grid_.visible(m);
        const std::vector<double> p = softmax(scores.row(m - first), visible, visible.end);
        for (std::int64_t n = visible.begin; n < visible.end; ++n) {
          entries.push_back({m, n});
          mass.push_back(p[n]);
        }
      }
    }
    const auto count = static_cast<std::int64_t>(entries.size());
    for (const std::int64_t i : smallest_cover(mass, {}, rule_.gamma, 0, count)) {
      kept_[entries[i].m].push_back(entries[i].n);
    }
  }

  const Rule& rule_;
  const BlockGrid& grid_;
  const PooledKeys& pooled_;
  PooledKeys::Scratch& scratch_;
  std::vector<std::vector<std::int64_t>> kept_;  // [row blocks]
};

class FlexPrefillMethod final : public Method {
 public:
  const char* name() const override { return "flexprefill"; }
  const char* summary() const override {
    return "per head block columns and diagonals, or a pooled map, until they hold gamma of the "
           "mass";
  }
  std::vector<MethodOption> options() const override {
    return {
        {"gamma", "share of the estimated mass to keep", 0.9, 0, 1, false},
        {"tau", "heads whose pooled estimate errs less use the pooled map", 0.1, 0, 1, false},
        {"min_budget", "tokens kept at least as columns, and as diagonals", 0, 0, kMaxCount, true},
        {"max_budget", "tokens kept at most as each, not below min_budget; 0: no limit", 0, 0,
         kMaxCount, true},
        {"block_size", "rows and keys of a block", 128, 64, 1024, true, kRowBlock},
        estimate_every_option()};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput&, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext&) const override {
    const Rule rule(options);
    IndexRecipe recipe;
    recipe.kind = IndexRecipe::Kind::kFlexPrefill;
    recipe.flexprefill = {rule.block_size, rule.gamma, rule.tau, rule.min_blocks, rule.max_blocks};
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const Stopwatch watch;
    const Rule rule(options);
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    std::vector<SequenceGeometry> geometry;
    std::vector<BlockGrid> grids;
    std::vector<std::uint8_t> wanted;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      const SequenceGeometry& sequence = geometry.emplace_back(input, params, b);
      grids.emplace_back(sequence, rule.block_size);
      const bool sparse = sequence.q_len > 0 && !rule.is_dense(sequence.kv_len);
      wanted.insert(wanted.end(), index.q_heads, sparse ? 1 : 0);
    }
    SharedEstimate shared(input, context, index, geometry, whole_option(options, "estimate_every"));
    const std::vector<std::uint8_t> renewed = shared.renew(wanted);
    // Means are needed where heads are estimated, and for the maps of query-aware ones.
    std::vector<std::uint8_t> pool = renewed;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      for (std::int64_t h = 0; h < index.q_heads; ++h) {
        const std::int64_t i = b * index.q_heads + h;
        if (wanted[i] != 0 && shared.head(b, h).kind == HeadIndex::Kind::kBlock) pool[i] = 1;
      }
    }
    const PooledKeys pooled(input, params, rule.block_size, pool);
    std::vector<PooledKeys::Scratch> scratch(resolve_threads(params.threads));
    estimate_last_q_blocks(
        input, params, rule.block_size, renewed, [&](const LastQBlocks& estimate, int thread) {
          shared.head(estimate.b, estimate.h) =
              HeadEstimate(rule, grids[estimate.b], pooled, scratch[thread])(estimate);
        });
    const auto heads = static_cast<std::int64_t>(index.heads.size());
    parallel_for(heads, params.threads, [&](std::int64_t i, int thread) {
      if (wanted[i] == 0) return;
      const std::int64_t b = i / index.q_heads;
      const std::int64_t h = i % index.q_heads;
      index.heads[i] = HeadBuilder(rule, grids[b], pooled, scratch[thread])
                           .build(b, h, shared.head(b, h), input.q.tokens());
    });
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& flexprefill_method() {
  static const FlexPrefillMethod method;
  return method;
}

}  // namespace minference

// auto: per head and chunk the cheapest columns and runs that hold a share of the attention mass,
// or exact attention where that is as fast.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/stopwatch.h"
#include "index/coverage.h"
#include "methods/cost_model.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"
#include "minference/guard.h"

namespace minference {
namespace {

// A head that ran dense after an estimate is not estimated again before the prompt is longer by this
// factor: where nothing is sparse, estimates must not add up.
constexpr double kDenseBackoff = 1.5;
// Rows of the check whether an earlier chunk's index still holds, and what it may have lost.
constexpr std::int64_t kCheckRows = 4;
constexpr double kCheckSlack = 0.05;
// An index is chosen by the rows that it was estimated from, and holds less of all others' mass: on
// real prompts about this share of what it leaves out.
constexpr double kOptimism = 0.25;

struct Rule {
  double coverage = 0;  // that is asked for
  double aim = 0;       // of the sampled rows' mass
  std::int64_t rows = 0;
  std::int64_t min_keys = 0;
  std::int64_t share_rows = 0;
  double max_cost = 0;

  explicit Rule(const MethodOptions& options)
      : coverage(options.at("coverage")),
        aim(coverage + kOptimism * coverage * (1 - coverage)),
        rows(whole_option(options, "estimate_rows")),
        min_keys(whole_option(options, "min_keys")),
        share_rows(whole_option(options, "share_rows")),
        max_cost(options.at("max_cost")) {}
};

// Mean number of keys that a row of the chunk sees.
double mean_keys(const SequenceGeometry& geometry) {
  return geometry.q_len > 0
             ? static_cast<double>(geometry.pairs()) / static_cast<double>(geometry.q_len)
             : 0.0;
}

class IndexBuilder {
 public:
  IndexBuilder(const AttentionInput& input, const AttentionParams& params, const Rule& rule,
               MethodState& state)
      : input_(input),
        params_(params),
        rule_(rule),
        state_(state),
        index_(dense_method().build_index(input, params, {}, {})),
        wanted_(index_.heads.size(), 0) {
    fit_state(state, index_);
    for (std::int64_t b = 0; b < index_.batch; ++b) geometry_.emplace_back(input, params, b);
  }

  SparseIndex build() {
    for (std::int64_t b = 0; b < index_.batch; ++b) plan_sequence(b);
    drop_what_no_longer_holds();
    if (std::find(wanted_.begin(), wanted_.end(), 1) != wanted_.end()) {
      costs_ = cost_model(choose_isa(allows_bf16(input_, params_)), input_.k.dim(), input_.v.dim(),
                          params_.threads);
      estimate_coverage(input_, params_, rule_.rows, wanted_,
                        [this](const MassTable& table) { take(table); });
    }
    return std::move(index_);
  }

 private:
  // Which heads run dense, are estimated, or keep the index of an earlier chunk.
  void plan_sequence(std::int64_t b) {
    const SequenceGeometry& geometry = geometry_[b];
    if (geometry.q_len == 0) return;
    // Rows from before the end of what is remembered are of another prompt.
    if (geometry.position(0) < state_.kv_lens[b]) forget(b);
    state_.kv_lens[b] = geometry.kv_len;
    if (mean_keys(geometry) < static_cast<double>(rule_.min_keys)) return;
    for (std::int64_t i = b * index_.q_heads; i < (b + 1) * index_.q_heads; ++i) {
      if (geometry.kv_len >= state_.next_estimate[i]) {
        wanted_[i] = 1;
      } else {
        index_.heads[i] = state_.index.heads[i];
      }
    }
  }

  void forget(std::int64_t b) {
    for (std::int64_t i = b * index_.q_heads; i < (b + 1) * index_.q_heads; ++i) {
      state_.index.heads[i] = {};
      state_.next_estimate[i] = 0;
    }
  }

  void drop_what_no_longer_holds() {
    const bool shared = std::any_of(index_.heads.begin(), index_.heads.end(), [](const auto& head) {
      return head.kind != HeadIndex::Kind::kDense;
    });
    if (!shared) return;
    const std::vector<double> recall = mass_recall(input_, params_, index_, kCheckRows);
    for (std::size_t i = 0; i < recall.size(); ++i) {
      if (recall[i] >= rule_.coverage - kCheckSlack) continue;
      index_.heads[i] = {};
      wanted_[i] = 1;
    }
  }

  // Each head has entries of its own in what this writes.
  void take(const MassTable& table) {
    const std::int64_t i = table.b * index_.q_heads + table.h;
    const Covering covering = cover(table, rule_.aim, {costs_.run_key, costs_.column_key});
    const double sparse = costs_.sparse(covering.run_keys, covering.column_keys);
    const double dense = costs_.dense(mean_keys(geometry_[table.b]));
    if (sparse < rule_.max_cost * dense) {
      index_.heads[i] = covering.head(table);
      state_.next_estimate[i] = table.kv_len + rule_.share_rows;
    } else {
      state_.next_estimate[i] =
          static_cast<std::int64_t>(std::ceil(static_cast<double>(table.kv_len) * kDenseBackoff));
    }
    state_.index.heads[i] = index_.heads[i];
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const Rule& rule_;
  MethodState& state_;
  SparseIndex index_;
  std::vector<std::uint8_t> wanted_;  // heads that are estimated
  std::vector<SequenceGeometry> geometry_;
  CostModel costs_;
};

class AutoMethod final : public Method {
 public:
  const char* name() const override { return "auto"; }
  const char* summary() const override {
    return "per head the cheapest columns and runs that hold a share of the mass, dense where that "
           "is as fast";
  }
  std::vector<MethodOption> options() const override {
    return {
        {"coverage",
         "share of the attention mass beyond the first 4 keys (sinks) that every head keeps", 0.95,
         0, 1, false},
        {"estimate_rows", "query rows per chunk that are looked at", 48, 1, 64, true},
        {"min_keys", "rows that see fewer keys on average run dense", 1024, 0, kMaxCount, true},
        {"share_rows",
         "rows of the prompt after which a head is estimated anew; until then its index is kept "
         "while a few rows confirm it",
         2048, 0, kMaxCount, true},
        {"max_cost",
         "share of the time of exact attention above which a head runs dense, by a model of this "
         "machine",
         0.95, 0, 1000, false}};
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const Stopwatch watch;
    const Rule rule(options);
    MethodState of_this_call;
    MethodState& state = context.state == nullptr ? of_this_call : *context.state;
    SparseIndex index = IndexBuilder(input, params, rule, state).build();
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& auto_method() {
  static const AutoMethod method;
  return method;
}

}  // namespace minference

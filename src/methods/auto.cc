// auto: per chunk the cheapest columns and runs with which a layer's heads hold a share of the
// attention mass, or exact attention where that is as fast.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/stopwatch.h"
#include "index/allocate.h"
#include "index/coverage.h"
#include "index/coverage_rule.h"
#include "index/covering.h"
#include "index/kept_mass.h"
#include "methods/cost_model.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"

namespace minference {
namespace {

// A head that ran dense after an estimate is not estimated again before the prompt is longer by this
// factor: where nothing is sparse, estimates must not add up.
constexpr double kDenseBackoff = 1.5;
// What the index of an earlier chunk may keep less than when it was estimated.
constexpr double kCheckSlack = 0.05;
// Rows of a chunk that judge the index of an earlier one.
constexpr std::int64_t kCheckRows = 8;

// The options. How long an index is kept counts on the CPU alone.
struct Rule : CoverageRule {
  std::int64_t share_rows = 0;

  explicit Rule(const MethodOptions& options) : share_rows(whole_option(options, "share_rows")) {
    coverage = options.at("coverage");
    long_keys = options.at("long_keys");
    rows = whole_option(options, "estimate_rows");
    min_keys = whole_option(options, "min_keys");
    max_cost = options.at("max_cost");
    last_rows = whole_option(options, "last_rows");
  }
};

// Mean number of keys that a row of the chunk sees.
double mean_keys(const SequenceGeometry& geometry) {
  return geometry.q_len > 0
             ? static_cast<double>(geometry.pairs()) / static_cast<double>(geometry.q_len)
             : 0.0;
}

// A head with its estimate, until the heads of its sequence have shared what they may lose.
struct Candidate {
  MassTable table;
  std::vector<Covering> coverings;

  // Behind the last covering stands exact attention.
  double loss(std::int64_t offer) const {
    return offer < static_cast<std::int64_t>(coverings.size()) ? 1 - coverings[offer].share : 0.0;
  }
};

class IndexBuilder {
 public:
  IndexBuilder(const AttentionInput& input, const AttentionParams& params, const Rule& rule,
               const MethodContext& context, MethodState& state)
      : input_(input),
        params_(params),
        rule_(rule),
        context_(context),
        state_(state),
        index_(dense_method().build_index(input, params, {}, {})),
        wanted_(index_.heads.size(), 0),
        candidates_(index_.heads.size()) {
    fit_state(state, index_);
    for (std::int64_t b = 0; b < index_.batch; ++b) geometry_.emplace_back(input, params, b);
  }

  SparseIndex build() {
    known_.heads.resize(index_.heads.size());
    for (std::int64_t b = 0; b < index_.batch; ++b) plan_sequence(b);
    check_known();
    if (std::find(wanted_.begin(), wanted_.end(), 1) != wanted_.end()) {
      costs_ = cost_model(choose_isa(allows_bf16(input_, params_)), input_.k.dim(), input_.v.dim(),
                          params_.threads);
      // Each head has an entry of its own in what this writes.
      const auto keep = [this](const MassTable& table) {
        candidates_[table.b * index_.q_heads + table.h] = {
            table, coverings(table, {costs_.run_key, costs_.column_key})};
      };
      estimate_coverage(input_, params_, rule_.rows, wanted_, keep);
      for (std::int64_t b = 0; b < index_.batch; ++b) choose(b);
    }
    for (std::int64_t b = 0; b < index_.batch; ++b) keep_last_rows(b);
    return std::move(index_);
  }

 private:
  // Which heads run dense, are estimated, or keep the index of an earlier chunk if it still holds.
  void plan_sequence(std::int64_t b) {
    const SequenceGeometry& geometry = geometry_[b];
    known_.rows.push_back(spread_rows(geometry.q_len, kCheckRows));
    if (geometry.q_len == 0) return;
    // Rows from before the end of what is remembered are of another prompt.
    if (geometry.position(0) < state_.kv_lens[b]) forget(b);
    state_.kv_lens[b] = geometry.kv_len;
    if (mean_keys(geometry) < static_cast<double>(rule_.min_keys)) return;
    for (std::int64_t i = b * index_.q_heads; i < (b + 1) * index_.q_heads; ++i) {
      const HeadIndex& remembered = state_.index.heads[i];
      if (geometry.kv_len >= state_.next_estimate[i]) {
        wanted_[i] = 1;
      } else if (remembered.kind != HeadIndex::Kind::kDense) {
        index_.heads[i] = remembered;
        known_.heads[i] = &remembered;
      }
    }
  }

  // Heads whose remembered index keeps too little are estimated.
  void check_known() {
    known_.least_key = MassTable::kSinks;
    for_each_kept_mass(input_, params_, known_,
                       [&](std::int64_t i, std::span<const RowMass> masses) {
                         double kept = 0;
                         double all = 0;
                         for (const RowMass& mass : masses) {
                           kept += mass.kept;
                           all += mass.kept + mass.left_out;
                         }
                         const double least = state_.kept_share[i] - kCheckSlack;
                         if (all > 0 && kept / all < least) wanted_[i] = 1;
                       });
  }

  void forget(std::int64_t b) {
    for (std::int64_t i = b * index_.q_heads; i < (b + 1) * index_.q_heads; ++i) {
      state_.index.heads[i] = {};
      state_.next_estimate[i] = 0;
    }
  }

  // The estimated heads of a sequence share what they may lose: steps to dearer coverings are taken,
  // those that spare most for their cost first, until the mean loss is allowed. What is spared is a
  // power of the loss, so that heads whose mass is cheap to hold lose less and none loses all.
  void choose(std::int64_t b) {
    const double keys = mean_keys(geometry_[b]);
    const double dense = rule_.max_cost * costs_.dense(keys);
    std::vector<std::int64_t> heads;
    std::vector<std::vector<Offer>> offers;
    for (std::int64_t i = b * index_.q_heads; i < (b + 1) * index_.q_heads; ++i) {
      if (candidates_[i].coverings.empty()) continue;
      heads.push_back(i);
      std::vector<Offer>& own = offers.emplace_back();
      for (const Covering& covering : candidates_[i].coverings) {
        own.push_back({costs_.sparse(covering.run_keys, covering.column_keys),
                       -std::pow(1 - covering.share, kLossPower)});
      }
      own.push_back({dense, 0.0});
    }
    const Ascent all = ascent(offers);
    std::vector<std::int64_t> chosen = all.start;
    const auto loss = [&](std::size_t h, std::int64_t offer) {
      return candidates_[heads[h]].loss(offer);
    };
    double lost = 0;
    for (std::size_t h = 0; h < heads.size(); ++h) lost += loss(h, chosen[h]);
    const double allowed =
        allowed_loss(rule_, geometry_[b].kv_len) * static_cast<double>(heads.size());
    for (const Step& step : all.steps) {
      if (lost <= allowed) break;
      lost -= loss(step.head, chosen[step.head]) - loss(step.head, step.offer);
      chosen[step.head] = step.offer;
    }
    for (std::size_t h = 0; h < heads.size(); ++h) take(heads[h], chosen[h]);
  }

  // The covering with that number, or exact attention behind the last one.
  void take(std::int64_t i, std::int64_t offer) {
    const Candidate& candidate = candidates_[i];
    const std::int64_t kv_len = candidate.table.kv_len;
    if (offer < static_cast<std::int64_t>(candidate.coverings.size())) {
      index_.heads[i] = candidate.coverings[offer].head(candidate.table);
      state_.kept_share[i] = 1 - candidate.loss(offer);
      state_.next_estimate[i] = kv_len + rule_.share_rows;
    } else {
      index_.heads[i] = {};
      state_.next_estimate[i] =
          static_cast<std::int64_t>(std::ceil(static_cast<double>(kv_len) * kDenseBackoff));
    }
    state_.index.heads[i] = index_.heads[i];
  }

  // Not remembered: what a chunk's end needs says nothing about the next one's.
  void keep_last_rows(std::int64_t b) {
    const std::int64_t after = context_.rows_after.empty() ? -1 : rows_after(input_, context_, b);
    const std::int64_t rows = exact_last_rows(rule_, geometry_[b].q_len, after);
    for (std::int64_t h = 0; h < index_.q_heads; ++h) {
      HeadIndex& head = index_.head(b, h);
      if (head.kind != HeadIndex::Kind::kDense) head.dense_last_rows = rows;
    }
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const Rule& rule_;
  const MethodContext& context_;
  MethodState& state_;
  SparseIndex index_;
  std::vector<std::uint8_t> wanted_;   // heads that are estimated
  KeptMassRequest known_;              // heads that keep an earlier index if it still holds
  std::vector<Candidate> candidates_;  // the estimated heads'
  std::vector<SequenceGeometry> geometry_;
  CostModel costs_;
};

class AutoMethod final : public Method {
 public:
  const char* name() const override { return "auto"; }
  const char* summary() const override {
    return "the cheapest columns and runs with which a layer's heads hold a share of the mass, "
           "dense where that is as fast";
  }
  std::vector<MethodOption> options() const override {
    return {
        {"coverage",
         "share of the attention mass beyond the first 4 keys (sinks) that a layer's heads keep in "
         "the mean",
         0.95, 0, 1, false},
        {"long_keys",
         "keys of a prompt from which on heads lose as much as coverage lets them; before it less, "
         "in proportion, but no less than 0.4 of it",
         20480, 1, kMaxCount, true},
        {"estimate_rows", "query rows per chunk that are looked at", 48, 1, 64, true},
        {"min_keys", "rows that see fewer keys on average run dense", 1024, 0, kMaxCount, true},
        {"share_rows",
         "rows of the prompt after which a head is estimated anew; until then its index is kept "
         "while a few rows confirm it",
         2048, 0, kMaxCount, true},
        {"max_cost",
         "share of the time of exact attention above which a head runs dense, by a model of this "
         "machine",
         0.95, 0, 1000, false},
        {"last_rows",
         "last rows of the prompt that see every key (of each chunk if the host cannot tell, there "
         "at most one in 32 rows or 16)",
         64, 0, kMaxCount, true}};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput&, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext& context) const override {
    IndexRecipe recipe;
    recipe.kind = IndexRecipe::Kind::kCoverage;
    recipe.coverage = Rule(options);
    recipe.rows_after.assign(context.rows_after.begin(), context.rows_after.end());
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const Stopwatch watch;
    const Rule rule(options);
    MethodState of_this_call;
    MethodState& state = context.state == nullptr ? of_this_call : *context.state;
    SparseIndex index = IndexBuilder(input, params, rule, context, state).build();
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

// mminference: heads that treat text and visual tokens of a prompt differently: grids inside visual
// segments, and estimates of their own on either side of a boundary between modalities.
// Source: MMInference (arXiv 2504.16083) §3.
#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "core/stopwatch.h"
#include "index/block_grid.h"
#include "index/grid_lines.h"
#include "index/last_q.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/modalities.h"
#include "methods/shared_estimate.h"
#include "minference/error.h"

namespace minference {
namespace {

using Kind = ModalityRule::Kind;

struct Rule : ModalityRule {
  std::int64_t n_init = 0;
  GridSearch search;
  std::int64_t estimate_every = 0;

  explicit Rule(const MethodOptions& options)
      : ModalityRule{static_cast<Kind>(whole_option(options, "kind")),
                     whole_option(options, "vertical_size"),
                     whole_option(options, "slash_size"),
                     whole_option(options, "n_local"),
                     whole_option(options, "fold_columns"),
                     options.at("grid_share"),
                     options.at("min_gain")},
        n_init(whole_option(options, "n_init")),
        search{whole_option(options, "min_stride"), whole_option(options, "max_stride"),
               fold_columns},
        estimate_every(whole_option(options, "estimate_every")) {
    if (search.max_stride < search.min_stride) {
      throw InvalidArgument("option max_stride of method mminference is " +
                            std::to_string(search.max_stride) + "; legal: min_stride, " +
                            std::to_string(search.min_stride) + ", and more");
    }
  }
};

// What is the same for all heads of a sequence.
struct Sequence {
  SequenceGeometry geometry;
  Modalities modalities;
  EstimatePlan plan;
  std::uint8_t among_rows = 0;  // as Modalities has it, where it matters
  // Places in plan.samples: the last rows of text, of visual tokens, of the chunk.
  std::optional<std::size_t> text;
  std::optional<std::size_t> visual;
  std::optional<std::size_t> last;

  Sequence(const Rule& rule, const SequenceGeometry& sequence, std::span<const Segment> segments)
      : geometry(sequence), modalities(segments, sequence.kv_len) {
    const Kind kind = has_visual() ? rule.kind : Kind::kVerticalSlash;
    if (kind == Kind::kAuto || kind == Kind::kVerticalSlash) {
      last = add({geometry.q_len - std::min(kLastQ, geometry.q_len), geometry.q_len});
    }
    if (kind == Kind::kVerticalSlash) return;
    among_rows = modalities.among_rows(geometry);
    // Without visual rows a grid head has no sample and is dense: rows of text see everything.
    visual = add(modalities.last_rows(geometry, Modality::kVisual, kLastQ));
    if (kind == Kind::kGrid) return;
    text = add(modalities.last_rows(geometry, Modality::kText, kLastQ));
    if (kind != Kind::kQBoundary) plan.apart = modalities.visual_runs();
  }

  bool has_visual() const { return !modalities.visual().empty(); }

  // Whether modalities make a difference.
  bool is_divided(const Rule& rule) const {
    return has_visual() && rule.kind != Kind::kVerticalSlash;
  }

  // Whether heads need no estimate: the budgets keep every key. A grid has none.
  bool is_covered(const Rule& rule) const {
    const bool grid = rule.kind == Kind::kGrid && has_visual();
    return !grid && budgets_cover_all(rule.vertical, rule.slash, geometry.kv_len);
  }

  // Keys that all rows of a grid head see: the reference's sink reaches to the first visual token.
  std::int64_t initial_keys(const Rule& rule) const {
    return std::max(rule.n_init, modalities.visual().front().begin);
  }

  // Position of the first row of the visual sample.
  std::int64_t sampled_position() const { return geometry.position(plan.samples[*visual].begin); }

  // Where the lines of a visual segment are looked for. Sinks and the local window are heavy
  // everywhere, and would hide them.
  TokenRange grid_region(const Segment& segment) const {
    return {std::max(segment.begin, kForcedColumns),
            std::min(segment.end, sampled_position() - kForcedOffsets + 1)};
  }

 private:
  std::optional<std::size_t> add(TokenRange sample) {
    if (sample.begin == sample.end) return std::nullopt;
    for (std::size_t i = 0; i < plan.samples.size(); ++i) {
      if (plan.samples[i].begin == sample.begin && plan.samples[i].end == sample.end) return i;
    }
    plan.samples.push_back(sample);
    return plan.samples.size() - 1;
  }
};

// Both ascend, without repetition.
std::vector<std::int64_t> united(const std::vector<std::int64_t>& a,
                                 const std::vector<std::int64_t>& b) {
  std::vector<std::int64_t> result;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
  return result;
}

// What a head of the diagonal form keeps; both ascend.
struct Sets {
  std::vector<std::int64_t> columns;
  std::vector<std::int64_t> offsets;

  void add(const Sets& other) {
    columns = united(columns, other.columns);
    offsets = united(offsets, other.offsets);
  }
};

// The forced positions and the heaviest that have any mass, `budget` in all.
std::vector<std::int64_t> heaviest(std::span<const float> mass, std::int64_t forced,
                                   std::int64_t budget) {
  std::vector<std::int64_t> kept = forced_and_heaviest(mass, forced, budget);
  std::erase_if(kept, [&](std::int64_t i) { return i >= forced && mass[i] == 0.0F; });
  return kept;
}

// What the estimates of one head of a sequence with visual tokens say: columns and offsets, or, of the
// block form and empty, a grid with its lines.
class HeadEstimate {
 public:
  HeadEstimate(const Rule& rule, const Sequence& sequence, std::span<const LastQEstimate> estimates)
      : rule_(rule), sequence_(sequence), estimates_(estimates) {}

  HeadIndex head(std::vector<GridLines>& lines) {
    Kind kind = rule_.kind;
    if (kind == Kind::kAuto || kind == Kind::kGrid) find_lines();
    if (kind == Kind::kAuto) kind = choose();
    if (kind == Kind::kGrid) {
      if (lines_.empty()) return diagonal_head(of_group(estimates_[*sequence_.visual]));
      lines = lines_;
      HeadIndex grid;
      grid.kind = HeadIndex::Kind::kBlock;
      return grid;
    }
    if (kind == Kind::kVerticalSlash) return diagonal_head(of_group(estimates_[*sequence_.last]));
    Sets sets;
    for (const LastQEstimate* group : groups()) {
      sets.add(kind == Kind::kQBoundary ? of_group(*group) : of_pairs(*group));
    }
    return diagonal_head(std::move(sets));
  }

 private:
  // One estimate for each modality among the chunk's rows.
  std::vector<const LastQEstimate*> groups() const {
    std::vector<const LastQEstimate*> result;
    for (const auto& sample : {sequence_.text, sequence_.visual}) {
      if (sample) result.push_back(&estimates_[*sample]);
    }
    return result;
  }

  std::vector<std::int64_t> group_columns(const LastQEstimate& group) const {
    return heaviest(group.columns, kForcedColumns, rule_.vertical);
  }
  Sets of_group(const LastQEstimate& group) const {
    std::vector<float> offsets(group.diagonals.begin(), group.diagonals.end());
    for (std::size_t i = 0; i < group.apart.size(); ++i) offsets[i] += group.apart[i];
    return {group_columns(group), heaviest(offsets, kForcedOffsets, rule_.slash)};
  }

  // The whole budgets for the text and again for the visual keys of one group of rows.
  std::vector<std::int64_t> pair_columns(const LastQEstimate& group) const {
    std::vector<float> text(group.columns.begin(), group.columns.end());
    std::vector<float> visual(text.size(), 0.0F);
    for (const TokenRange& run : sequence_.modalities.visual_runs()) {
      for (std::int64_t key = run.begin; key < run.end; ++key) std::swap(text[key], visual[key]);
    }
    return united(heaviest(text, kForcedColumns, rule_.vertical),
                  heaviest(visual, kForcedColumns, rule_.vertical));
  }
  Sets of_pairs(const LastQEstimate& group) const {
    return {pair_columns(group), united(heaviest(group.diagonals, kForcedOffsets, rule_.slash),
                                        heaviest(group.apart, kForcedOffsets, rule_.slash))};
  }

  static HeadIndex diagonal_head(Sets sets) {
    HeadIndex head;
    head.kind = HeadIndex::Kind::kDiagonal;
    head.columns = std::move(sets.columns);
    head.runs = runs_of(sets.offsets);
    return head;
  }

  // The coarsest kind that serves the estimates: a grid where lines hold the mass, otherwise each
  // boundary that is worth its cost.
  Kind choose() const {
    if (lines_hold_the_mass()) return Kind::kGrid;
    const std::vector<std::int64_t> together = group_columns(estimates_[*sequence_.last]);
    double gain_by_query = 0.0;
    double gain_by_pair = 0.0;
    for (const LastQEstimate* group : groups()) {
      const double own = kept_share(*group, group_columns(*group));
      gain_by_query = std::max(gain_by_query, own - kept_share(*group, together));
      gain_by_pair = std::max(gain_by_pair, kept_share(*group, pair_columns(*group)) - own);
    }
    if (gain_by_pair >= rule_.min_gain) return Kind::k2DBoundary;
    if (gain_by_query >= rule_.min_gain) return Kind::kQBoundary;
    return Kind::kVerticalSlash;
  }

  // Share of a group's mass on some columns.
  static double kept_share(const LastQEstimate& group, const std::vector<std::int64_t>& columns) {
    const double total = std::accumulate(group.columns.begin(), group.columns.end(), 0.0);
    double kept = 0.0;
    for (const std::int64_t column : columns) kept += group.columns[column];
    return total > 0.0 ? kept / total : 0.0;
  }

  void find_lines() {
    if (!sequence_.visual) return;
    const std::span<const float> columns = estimates_[*sequence_.visual].columns;
    for (const Segment& segment : sequence_.modalities.visual()) {
      const auto lines =
          find_grid_lines(columns, {segment.begin, segment.end}, sequence_.grid_region(segment),
                          segment.stride, rule_.search);
      if (lines) lines_.push_back(*lines);
    }
  }

  bool lines_hold_the_mass() const {
    if (lines_.empty()) return false;
    const std::span<const float> columns = estimates_[*sequence_.visual].columns;
    const std::int64_t begin = sequence_.initial_keys(rule_);
    const std::int64_t end = sequence_.sampled_position() - rule_.n_local + 1;
    double outside = 0.0;
    double on_lines = 0.0;
    for (std::int64_t key = begin; key < end; ++key) outside += columns[key];
    for (const GridLines& lines : lines_) {
      for (std::int64_t key = lines.begin; key < std::min(lines.end, end); key += lines.stride) {
        if (key >= begin) on_lines += columns[key];
      }
    }
    return outside > 0.0 && on_lines >= rule_.grid_share * outside;
  }

  const Rule& rule_;
  const Sequence& sequence_;
  std::span<const LastQEstimate> estimates_;
  std::vector<GridLines> lines_;
};

// Whether a row sees every key of a grid head: text, and rows on a line.
bool sees_all(const Sequence& sequence, std::span<const GridLines> lines, std::int64_t row) {
  const std::int64_t position = sequence.geometry.position(row);
  if (position < 0) return false;
  return !sequence.modalities.is_visual(position) ||
         std::any_of(lines.begin(), lines.end(),
                     [=](const GridLines& one) { return one.contains(position); });
}

// Lines that were found in earlier tokens of their segments go on to what is there now.
std::vector<GridLines> prolonged(const Sequence& sequence, std::vector<GridLines> lines) {
  for (GridLines& one : lines) {
    for (const Segment& segment : sequence.modalities.visual()) {
      if (segment.begin <= one.begin && one.begin < segment.end) one.end = segment.end;
    }
  }
  return lines;
}

// In whole blocks: a block of rows keeps what any of its rows does.
HeadIndex grid_head(const Rule& rule, const Sequence& sequence, std::span<const GridLines> lines,
                    std::int64_t q_tokens) {
  const SequenceGeometry& geometry = sequence.geometry;
  const BlockGrid grid(geometry, kKeyBlock);
  std::vector<std::uint8_t> everywhere(grid.key_blocks(), 0);
  const std::int64_t initial_blocks = (sequence.initial_keys(rule) + kKeyBlock - 1) / kKeyBlock;
  std::fill_n(everywhere.begin(), std::min(initial_blocks, grid.key_blocks()), 1);
  for (const GridLines& one : lines) {
    for (std::int64_t key = one.begin; key < one.end; key += one.stride) {
      everywhere[key / kKeyBlock] = 1;
    }
  }
  std::vector<std::vector<std::int64_t>> kept(grid.row_blocks());
  for (std::int64_t m = 0; m < grid.row_blocks(); ++m) {
    const std::int64_t first = grid.first_row(m);
    const std::int64_t end = grid.end_row(m);
    bool all = false;
    for (std::int64_t row = first; row < end; ++row) all = all || sees_all(sequence, lines, row);
    const BlockGrid::Range visible = grid.visible(m);
    const BlockGrid::Range local = grid.at_positions(m, geometry.position(first) - rule.n_local + 1,
                                                     geometry.position(end - 1));
    for (std::int64_t n = visible.begin; n < visible.end; ++n) {
      if (all || everywhere[n] != 0 || local.contains(n)) kept[m].push_back(n);
    }
  }
  return block_head(grid, q_tokens, kept);
}

// The segments of sequence b, checked.
std::span<const Segment> segments_of(const AttentionInput& input, const AttentionParams& params,
                                     const MethodContext& context, std::int64_t b) {
  if (context.segments.empty()) return {};
  const auto size = static_cast<std::int64_t>(context.segments.size());
  if (size != input.q.batch()) {
    throw InvalidArgument(
        "segments has " + std::to_string(size) +
        " entries; legal: none, or one a sequence = " + std::to_string(input.q.batch()));
  }
  validate(context.segments[b],
           SequenceGeometry(input, params, b).kv_len + rows_after(input, context, b));
  return context.segments[b];
}

// What a device has to know of a sequence.
ModalitySequence look_of(const Rule& rule, const Sequence& sequence) {
  ModalitySequence look;
  look.dense = sequence.is_covered(rule) || sequence.plan.samples.empty();
  look.vertical_slash = !sequence.is_divided(rule);
  look.q_len = sequence.geometry.q_len;
  look.kv_len = sequence.geometry.kv_len;
  look.visual = sequence.modalities.visual_runs();
  look.samples = sequence.plan.samples;
  look.text_rows = sequence.text;
  look.visual_rows = sequence.visual;
  look.last_rows = sequence.last;
  if (look.vertical_slash) return look;
  look.initial_keys = sequence.initial_keys(rule);
  if (!sequence.visual) return look;
  for (const Segment& segment : sequence.modalities.visual()) {
    const TokenRange region = sequence.grid_region(segment);
    const StrideRange strides = candidate_strides(region, segment.stride, rule.search);
    look.grids.push_back({{segment.begin, segment.end}, region, strides.first, strides.last});
  }
  return look;
}

class MMInferenceMethod final : public Method {
 public:
  const char* name() const override { return "mminference"; }
  const char* summary() const override {
    return "vertical_slash per modality, or a grid, in prompts with visual segments";
  }
  bool takes_segments() const override { return true; }
  std::vector<MethodOption> options() const override {
    return {
        {"kind", "of every head: 0 auto, 1 grid, 2 q_boundary, 3 2d_boundary, 4 vertical_slash", 0,
         0, 4, true},
        {"vertical_size", "columns kept per estimate, at least 30", 1000, 0, kMaxCount, true},
        {"slash_size", "offsets kept per estimate, at least 100", 6096, 0, kMaxCount, true},
        {"n_init", "initial keys of grid heads, raised to the first visual token", 128, 0,
         kMaxCount, true},
        {"n_local", "nearest keys of grid heads", 1024, 1, kMaxCount, true},
        {"min_stride", "smallest period of a grid that is tried", 64, 2, 1e6, true},
        {"max_stride", "largest one, not below min_stride", 1024, 2, 1e6, true},
        {"fold_columns", "heaviest columns of a segment that are folded by each period", 256, 1,
         1e6, true},
        {"grid_share", "auto: share of the mass outside the A-shape that the lines of a grid hold",
         0.8, 0, 1, false},
        {"min_gain", "auto: share of a modality's mass for which a boundary is respected", 0.05, 0,
         1, false},
        estimate_every_option()};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput& input, const AttentionParams& params,
                                    const MethodOptions& options,
                                    const MethodContext& context) const override {
    const Rule rule(options);
    IndexRecipe recipe;
    recipe.kind = IndexRecipe::Kind::kModalities;
    recipe.modality = rule;
    bool divided = false;
    for (std::int64_t b = 0; b < input.q.batch(); ++b) {
      const Sequence sequence(rule, {input, params, b}, segments_of(input, params, context, b));
      divided = divided || sequence.is_divided(rule);
      recipe.sequences.push_back(look_of(rule, sequence));
    }
    if (divided) return recipe;
    HeadPattern pattern;
    pattern.vertical = rule.vertical;
    pattern.slash = rule.slash;
    IndexRecipe undivided;
    undivided.patterns.assign(input.q.heads(), pattern);
    return undivided;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const Stopwatch watch;
    const Rule rule(options);
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    std::vector<Sequence> sequences;
    std::vector<SequenceGeometry> geometry;
    std::vector<EstimatePlan> plans;
    std::vector<std::uint8_t> wanted;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      geometry.emplace_back(input, params, b);
      const Sequence& sequence =
          sequences.emplace_back(rule, geometry[b], segments_of(input, params, context, b));
      plans.push_back(sequence.plan);
      wanted.insert(wanted.end(), index.q_heads, sequence.is_covered(rule) ? 0 : 1);
    }
    SharedEstimate shared(input, context, index, geometry, rule.estimate_every);
    MethodState& state = shared.state();
    state.modalities.resize(index.batch);
    state.lines.resize(index.heads.size());
    for (std::int64_t b = 0; b < index.batch; ++b) {
      // An estimate knows nothing about rows of another modality.
      if (state.modalities[b] != sequences[b].among_rows) shared.forget(b);
      state.modalities[b] = sequences[b].among_rows;
    }
    const auto remember = [&](std::span<const LastQEstimate> estimates) {
      const LastQEstimate& first = estimates.front();
      const Sequence& sequence = sequences[first.b];
      if (sequence.is_divided(rule)) {
        shared.head(first.b, first.h) = HeadEstimate(rule, sequence, estimates)
                                            .head(state.lines[first.b * index.q_heads + first.h]);
      } else {
        shared.head(first.b, first.h) = vertical_slash_sets(first, rule.vertical, rule.slash);
      }
    };
    estimate_samples(input, params, plans, shared.renew(wanted), remember);
    const auto heads = static_cast<std::int64_t>(index.heads.size());
    parallel_for(heads, params.threads, [&](std::int64_t i, int) {
      const std::int64_t b = i / index.q_heads;
      const HeadIndex& remembered = shared.head(b, i % index.q_heads);
      if (wanted[i] == 0) return;
      index.heads[i] = remembered.kind == HeadIndex::Kind::kBlock
                           ? grid_head(rule, sequences[b], prolonged(sequences[b], state.lines[i]),
                                       input.q.tokens())
                           : dense_where_cheaper(remembered, geometry[b].q_len, geometry[b].kv_len);
    });
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& mminference_method() {
  static const MMInferenceMethod method;
  return method;
}

}  // namespace minference

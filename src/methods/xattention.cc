// xattention: per row block the fewest key blocks that hold a share of the mass which sums over
// antidiagonals estimate. Source: XAttention (arXiv 2503.16428) §2.
#include <limits>
#include <vector>

#include "core/stopwatch.h"
#include "index/antidiagonal.h"
#include "index/block_grid.h"
#include "index/top_k.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

// The forced key blocks and the heaviest others, until they hold `threshold` of the row block's
// mass.
std::vector<std::int64_t> covering_blocks(const BlockGrid& grid, const BlockMass& estimate,
                                          double threshold) {
  const BlockGrid::Range visible = grid.visible(estimate.m);
  std::vector<std::int64_t> forced = grid.forced(estimate.m);
  for (std::int64_t& n : forced) n -= visible.begin;
  std::vector<std::int64_t> kept =
      smallest_cover(estimate.mass.subspan(visible.begin, visible.size()), forced, threshold, 0,
                     std::numeric_limits<std::int64_t>::max());
  for (std::int64_t& n : kept) n += visible.begin;
  return kept;
}

class XAttentionMethod final : public Method {
 public:
  const char* name() const override { return "xattention"; }
  const char* summary() const override {
    return "per row block the blocks that hold most mass, estimated from antidiagonals";
  }
  std::vector<MethodOption> options() const override {
    return {{"stride", "one score in so many is estimated", 8, 1, 64, true, 1, kRowBlock},
            {"threshold", "share of the estimated mass to keep", 0.9, 0, 1, false},
            {"block_size", "rows and keys of a block", 128, 64, 1024, true, kRowBlock},
            {"norm", "divides the estimated scores", 1, 0.01, 100, false}};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput&, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext&) const override {
    IndexRecipe recipe;
    recipe.kind = IndexRecipe::Kind::kAntidiagonal;
    recipe.antidiagonal = {whole_option(options, "block_size"), whole_option(options, "stride"),
                           options.at("threshold"), options.at("norm")};
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const Stopwatch watch;
    AntidiagonalOptions antidiagonal;
    antidiagonal.block_size = whole_option(options, "block_size");
    antidiagonal.stride = whole_option(options, "stride");
    antidiagonal.norm = options.at("norm");
    const double threshold = options.at("threshold");

    SparseIndex index = dense_method().build_index(input, params, {}, {});
    std::vector<BlockGrid> grids;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      grids.emplace_back(SequenceGeometry(input, params, b), antidiagonal.block_size);
    }
    std::vector<std::vector<std::vector<std::int64_t>>> kept(index.heads.size());
    for (std::size_t i = 0; i < kept.size(); ++i) {
      kept[i].resize(grids[static_cast<std::int64_t>(i) / index.q_heads].row_blocks());
    }
    estimate_antidiagonals(input, params, antidiagonal, [&](const BlockMass& estimate) {
      kept[estimate.b * index.q_heads + estimate.h][estimate.m] =
          covering_blocks(grids[estimate.b], estimate, threshold);
    });
    for (std::size_t i = 0; i < kept.size(); ++i) {
      index.heads[i] = block_head(grids[static_cast<std::int64_t>(i) / index.q_heads],
                                  input.q.tokens(), kept[i]);
    }
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& xattention_method() {
  static const XAttentionMethod method;
  return method;
}

}  // namespace minference

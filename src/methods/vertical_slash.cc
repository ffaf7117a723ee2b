// vertical_slash: per head and chunk, the heaviest columns and offsets of the last queries' softmax.
// Source: MInference (arXiv 2407.02490) §3.2.
#include "methods/head_patterns.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"

namespace minference {
namespace {

class VerticalSlashMethod final : public Method {
 public:
  const char* name() const override { return "vertical_slash"; }
  const char* summary() const override {
    return "heaviest columns and diagonals, estimated from the last 64 queries of a chunk";
  }
  std::vector<MethodOption> options() const override {
    return {{"vertical_size", "columns kept per head, at least 30", 1000, 0, kMaxCount, true},
            {"slash_size", "offsets kept per head, at least 100", 6096, 0, kMaxCount, true},
            estimate_every_option()};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput& input, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext&) const override {
    IndexRecipe recipe;
    recipe.patterns.assign(input.q.heads(), pattern(options));
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    return build_from_patterns(
        input, params, [&](std::int64_t) { return pattern(options); }, context,
        whole_option(options, "estimate_every"));
  }

 private:
  static HeadPattern pattern(const MethodOptions& options) {
    HeadPattern pattern;
    pattern.vertical = whole_option(options, "vertical_size");
    pattern.slash = whole_option(options, "slash_size");
    return pattern;
  }
};

}  // namespace

const Method& vertical_slash_method() {
  static const VerticalSlashMethod method;
  return method;
}

}  // namespace minference

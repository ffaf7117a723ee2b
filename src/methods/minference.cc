// minference: the reference system's rule, one pattern per head from a pattern file.
#include <algorithm>
#include <cmath>

#include "methods/head_patterns.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"

namespace minference {
namespace {

class MInferenceMethod final : public Method {
 public:
  const char* name() const override { return "minference"; }
  const char* summary() const override {
    return "per-head patterns from a pattern file, vertical_slash (1000, 6096) without one";
  }
  bool takes_patterns() const override { return true; }
  std::vector<MethodOption> options() const override {
    return {{"minference_ratio", "factor on both budgets of every head", 1.0, 0.001, 1000, false},
            {"starting_layer", "layers below this one run dense", -1, -1, 1e6, true},
            estimate_every_option()};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput& input, const AttentionParams&,
                                    const MethodOptions& options,
                                    const MethodContext& context) const override {
    IndexRecipe recipe;
    const std::int64_t q_heads = input.q.heads();
    recipe.patterns.assign(q_heads, everything());
    if (dense_layer(options, context)) return recipe;
    for (std::int64_t h = 0; h < q_heads; ++h) {
      recipe.patterns[h] = pattern(h, options, context);
    }
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    if (dense_layer(options, context)) return dense_method().build_index(input, params, {}, {});
    return build_from_patterns(
        input, params, [&](std::int64_t h) { return pattern(h, options, context); }, context,
        whole_option(options, "estimate_every"));
  }

 private:
  static bool dense_layer(const MethodOptions& options, const MethodContext& context) {
    return static_cast<double>(context.layer) < options.at("starting_layer");
  }

  // A pattern that every context fits in runs dense.
  static HeadPattern everything() {
    HeadPattern pattern;
    pattern.vertical = pattern.slash = static_cast<std::int64_t>(kMaxCount);
    return pattern;
  }

  static HeadPattern pattern(std::int64_t h, const MethodOptions& options,
                             const MethodContext& context) {
    const double ratio = options.at("minference_ratio");
    const auto scaled = [&](std::int64_t budget) {
      return static_cast<std::int64_t>(std::floor(static_cast<double>(budget) * ratio));
    };
    HeadPattern pattern;
    if (context.patterns != nullptr) pattern = context.patterns->at(context.layer, h);
    pattern.vertical = scaled(pattern.vertical);
    pattern.slash = scaled(pattern.slash);
    return pattern;
  }
};

}  // namespace

const Method& minference_method() {
  static const MInferenceMethod method;
  return method;
}

}  // namespace minference

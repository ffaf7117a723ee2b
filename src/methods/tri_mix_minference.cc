// tri_mix_minference: minference in the first layers, tri_shape in the others (TriangleMix,
// arXiv 2507.21526).
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class TriMixMInferenceMethod final : public Method {
 public:
  const char* name() const override { return "tri_mix_minference"; }
  const char* summary() const override {
    return "tri_shape with a small window from layer starting_layer on, minference below it";
  }
  bool takes_patterns() const override { return true; }
  std::vector<MethodOption> options() const override {
    std::vector<MethodOption> options = triangle_options(8, 512, 128);
    options.push_back({"starting_layer", "layers below this one run minference", 16, 0, 1e6, true});
    options.push_back({"minference_ratio", "factor on both budgets of every head of those layers",
                       1.0, 0.001, 1000, false});
    return options;
  }

  bool reads_tensors(const MethodOptions& options, const MethodContext& context) const override {
    return context.layer < whole_option(options, "starting_layer");
  }
  std::optional<IndexRecipe> recipe(const AttentionInput& input, const AttentionParams& params,
                                    const MethodOptions& options,
                                    const MethodContext& context) const override {
    return minference_method().recipe(input, params, of_minference(options), context);
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    if (context.layer >= whole_option(options, "starting_layer")) {
      return build_triangle(input, params, options, context);
    }
    return minference_method().build_index(input, params, of_minference(options), context);
  }

 private:
  static MethodOptions of_minference(const MethodOptions& options) {
    return resolve_options(minference_method(),
                           {{"minference_ratio", options.at("minference_ratio")}});
  }
};

}  // namespace

const Method& tri_mix_minference_method() {
  static const TriMixMInferenceMethod method;
  return method;
}

}  // namespace minference

// tri_mix: dense in the first layers, tri_shape in the others (TriangleMix, arXiv 2507.21526).
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class TriMixMethod final : public Method {
 public:
  const char* name() const override { return "tri_mix"; }
  const char* summary() const override {
    return "tri_shape with a small window from layer starting_layer on, dense below it";
  }
  std::vector<MethodOption> options() const override {
    std::vector<MethodOption> options = triangle_options(8, 512, 128);
    options.push_back({"starting_layer", "layers below this one run dense", 16, 0, 1e6, true});
    return options;
  }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    if (context.layer < whole_option(options, "starting_layer")) {
      return dense_method().build_index(input, params, {}, {});
    }
    return build_triangle(input, params, options, context);
  }
};

}  // namespace

const Method& tri_mix_method() {
  static const TriMixMethod method;
  return method;
}

}  // namespace minference

// tri_shape: an A-shape whose last rows see everything, so that a question at the end of a prompt
// reaches all of it. Source: SCBench (arXiv 2412.10319).
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class TriShapeMethod final : public Method {
 public:
  const char* name() const override { return "tri_shape"; }
  const char* summary() const override {
    return "a_shape, and every key for the last n_last rows of the prompt";
  }
  std::vector<MethodOption> options() const override { return triangle_options(128, 3968, 100); }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    return build_triangle(input, params, options, context);
  }
};

}  // namespace

const Method& tri_shape_method() {
  static const TriShapeMethod method;
  return method;
}

}  // namespace minference

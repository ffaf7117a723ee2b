// a_shape: attention sinks and a local window, the same for every head (StreamingLLM's pattern).
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class AShapeMethod final : public Method {
 public:
  const char* name() const override { return "a_shape"; }
  const char* summary() const override {
    return "the first n_init keys and the n_local nearest, no estimate";
  }
  std::vector<MethodOption> options() const override {
    return {{"n_init", "initial keys that every row sees", 128, 0, kMaxCount, true},
            {"n_local", "nearest keys, the row's own included", 3968, 1, kMaxCount, true}};
  }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    return build_same_heads(input, params, [&](const SequenceGeometry& sequence, std::int64_t) {
      return a_shape_head(whole_option(options, "n_init"), whole_option(options, "n_local"),
                          sequence.kv_len);
    });
  }
};

}  // namespace

const Method& a_shape_method() {
  static const AShapeMethod method;
  return method;
}

}  // namespace minference

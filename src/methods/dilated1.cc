// dilated1: attention sinks and every stride-th key of a window, the same for every head.
// Source: the dilated baseline of MInference (arXiv 2407.02490) §4.
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class Dilated1Method final : public Method {
 public:
  const char* name() const override { return "dilated1"; }
  const char* summary() const override {
    return "the first n_init keys and every stride-th of the n_local nearest, no estimate";
  }
  std::vector<MethodOption> options() const override {
    return {{"n_init", "initial keys that every row sees", 1024, 0, kMaxCount, true},
            {"n_local", "nearest keys that are thinned out, from the row's own on", 8192, 1,
             kMaxCount, true},
            {"stride", "every how many of them are kept", 2, 1, kMaxCount, true}};
  }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const OffsetRun window{0, whole_option(options, "n_local"), whole_option(options, "stride")};
    return build_same_heads(input, params, [&](const SequenceGeometry& sequence, std::int64_t) {
      return fixed_head(whole_option(options, "n_init"), {window}, sequence.kv_len);
    });
  }
};

}  // namespace

const Method& dilated1_method() {
  static const Dilated1Method method;
  return method;
}

}  // namespace minference

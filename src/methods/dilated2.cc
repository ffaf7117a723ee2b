// dilated2: attention sinks, a local window and every stride-th key of a second window behind it,
// the same for every head. Source: the strided baseline of MInference (arXiv 2407.02490) §4.
#include "methods/head_rules.h"
#include "methods/method_table.h"

namespace minference {
namespace {

class Dilated2Method final : public Method {
 public:
  const char* name() const override { return "dilated2"; }
  const char* summary() const override {
    return "the first n_init keys, the n_local nearest, every stride-th of n_dilated more";
  }
  std::vector<const char*> aliases() const override { return {"strided"}; }
  std::vector<MethodOption> options() const override {
    return {{"n_init", "initial keys that every row sees", 1024, 0, kMaxCount, true},
            {"n_local", "nearest keys, the row's own included", 2048, 1, kMaxCount, true},
            {"n_dilated", "keys behind them that are thinned out", 4096, 0, kMaxCount, true},
            {"stride", "every how many of those are kept", 2, 1, kMaxCount, true}};
  }

  bool reads_tensors(const MethodOptions&, const MethodContext&) const override { return false; }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const std::int64_t n_local = whole_option(options, "n_local");
    const OffsetRun thinned{n_local, n_local + whole_option(options, "n_dilated"),
                            whole_option(options, "stride")};
    return build_same_heads(input, params, [&](const SequenceGeometry& sequence, std::int64_t) {
      return fixed_head(whole_option(options, "n_init"), {{0, n_local, 1}, thinned},
                        sequence.kv_len);
    });
  }
};

}  // namespace

const Method& dilated2_method() {
  static const Dilated2Method method;
  return method;
}

}  // namespace minference

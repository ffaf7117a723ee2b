// a_shape: attention sinks and a local window, the same for every head (StreamingLLM's pattern).
#include <algorithm>
#include <chrono>

#include "attention/visible_keys.h"
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
    return {{"n_init", "initial keys that every row sees", 128, 0, 1e9, true},
            {"n_local", "nearest keys, the row's own included", 3968, 1, 1e9, true}};
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options, const MethodContext&) const override {
    const auto start = std::chrono::steady_clock::now();
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    for (std::int64_t b = 0; b < index.batch; ++b) {
      const std::int64_t kv_len = SequenceGeometry(input, params, b).kv_len;
      const HeadIndex head = a_shape_head(static_cast<std::int64_t>(options.at("n_init")),
                                          static_cast<std::int64_t>(options.at("n_local")), kv_len);
      for (std::int64_t h = 0; h < index.q_heads; ++h) index.head(b, h) = head;
    }
    index.build_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return index;
  }
};

}  // namespace

const Method& a_shape_method() {
  static const AShapeMethod method;
  return method;
}

}  // namespace minference

// static: vertical_slash whose columns and offsets are estimated once, from a prompt's first chunk.
// Source: the static-pattern ablation of MInference (arXiv 2407.02490) §4.
#include <string>

#include "core/stopwatch.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"
#include "minference/error.h"

namespace minference {
namespace {

class StaticMethod final : public Method {
 public:
  const char* name() const override { return "static"; }
  const char* summary() const override {
    return "vertical_slash, estimated from the first chunk of a prompt and kept for the others";
  }
  std::vector<MethodOption> options() const override {
    return {{"vertical_size", "columns kept per head, at least 30", 1000, 0, kMaxCount, true},
            {"slash_size", "offsets kept per head, at least 100", 6096, 0, kMaxCount, true}};
  }

  std::optional<IndexRecipe> recipe(const AttentionInput& input, const AttentionParams& params,
                                    const MethodOptions& options,
                                    const MethodContext&) const override {
    // A prompt's first chunk, which is all that a device can do without what its estimate left.
    auto recipe = vertical_slash_method().recipe(input, params, options, {});
    recipe->first_chunks = true;
    return recipe;
  }

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const Stopwatch watch;
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    std::vector<SequenceGeometry> geometry;
    for (std::int64_t b = 0; b < index.batch; ++b) {
      const SequenceGeometry& sequence = geometry.emplace_back(input, params, b);
      if (context.state == nullptr && sequence.q_len > 0 && sequence.position(0) > 0) {
        throw InvalidArgument("method static got rows from position " +
                              std::to_string(sequence.position(0)) + " of sequence " +
                              std::to_string(b) +
                              " on without the state of the prompt's first chunk; legal: chunks "
                              "from position 0, or a MethodContext with a state");
      }
    }
    SharedEstimate shared(input, context, index, geometry, SharedEstimate::kForever);
    const std::vector<std::uint8_t> every_head(index.heads.size(), 1);
    estimate_last_q(input, params, kLastQ, shared.renew(every_head),
                    [&](const LastQEstimate& estimate) {
                      shared.head(estimate.b, estimate.h) =
                          vertical_slash_sets(estimate, whole_option(options, "vertical_size"),
                                              whole_option(options, "slash_size"));
                    });
    for (std::int64_t b = 0; b < index.batch; ++b) {
      if (geometry[b].q_len == 0) continue;
      for (std::int64_t h = 0; h < index.q_heads; ++h) {
        index.head(b, h) =
            dense_where_cheaper(shared.head(b, h), geometry[b].q_len, geometry[b].kv_len);
      }
    }
    index.build_seconds = watch.seconds();
    return index;
  }
};

}  // namespace

const Method& static_method() {
  static const StaticMethod method;
  return method;
}

}  // namespace minference

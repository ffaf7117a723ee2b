// static: vertical_slash whose columns and offsets are estimated once, from a prompt's first chunk.
// Source: the static-pattern ablation of MInference (arXiv 2407.02490) §4.
#include <algorithm>
#include <chrono>
#include <string>

#include "methods/head_rules.h"
#include "methods/method_table.h"
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

  SparseIndex build_index(const AttentionInput& input, const AttentionParams& params,
                          const MethodOptions& options,
                          const MethodContext& context) const override {
    const auto start = std::chrono::steady_clock::now();
    SparseIndex index = dense_method().build_index(input, params, {}, {});
    MethodState of_this_call;
    MethodState& state = context.state == nullptr ? of_this_call : *context.state;
    prepare(state, index);

    std::vector<SequenceGeometry> geometry;
    std::vector<std::uint8_t> wanted(index.heads.size(), 0);
    for (std::int64_t b = 0; b < index.batch; ++b) {
      const SequenceGeometry& sequence = geometry.emplace_back(input, params, b);
      if (sequence.q_len == 0) continue;
      const std::int64_t first = sequence.position(0);
      if (context.state == nullptr && first > 0) {
        throw InvalidArgument("method static got rows from position " + std::to_string(first) +
                              " of sequence " + std::to_string(b) +
                              " on without the state of the prompt's first chunk; legal: chunks "
                              "from position 0, or a MethodContext with a state");
      }
      // Rows that lie before the end of what was estimated replace it: another prompt has begun.
      if (state.kv_lens[b] != 0 && first >= state.kv_lens[b]) continue;
      state.kv_lens[b] = 0;
      for (std::int64_t h = 0; h < index.q_heads; ++h) state.index.head(b, h) = {};
      std::fill_n(wanted.begin() + b * index.q_heads, index.q_heads, 1);
    }
    estimate_last_q(input, params, kLastQ, wanted, [&](const LastQEstimate& estimate) {
      state.index.head(estimate.b, estimate.h) = vertical_slash_sets(
          estimate, whole_option(options, "vertical_size"), whole_option(options, "slash_size"));
    });
    for (std::int64_t b = 0; b < index.batch; ++b) {
      const SequenceGeometry& sequence = geometry[b];
      if (sequence.q_len == 0) continue;
      if (wanted[b * index.q_heads] != 0) state.kv_lens[b] = sequence.kv_len;
      for (std::int64_t h = 0; h < index.q_heads; ++h) {
        const HeadIndex& head = state.index.head(b, h);
        if (head.kind == HeadIndex::Kind::kDense) continue;
        index.head(b, h) = dense_where_cheaper(head, sequence.q_len, sequence.kv_len);
      }
    }
    index.build_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return index;
  }

 private:
  // An empty state becomes one that remembers nothing of these sequences. `dense`: their index with
  // dense heads.
  static void prepare(MethodState& state, const SparseIndex& dense) {
    if (state.kv_lens.empty()) {
      state.index = dense;
      state.kv_lens.assign(dense.batch, 0);
    }
    if (state.index.batch != dense.batch || state.index.q_heads != dense.q_heads) {
      throw InvalidArgument("the state is of " + std::to_string(state.index.batch) +
                            " sequences of " + std::to_string(state.index.q_heads) +
                            " query heads; the input has " + std::to_string(dense.batch) + " of " +
                            std::to_string(dense.q_heads));
    }
  }
};

}  // namespace

const Method& static_method() {
  static const StaticMethod method;
  return method;
}

}  // namespace minference

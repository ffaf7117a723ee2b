#include "methods/shared_estimate.h"

#include <algorithm>
#include <string>

#include "methods/head_rules.h"
#include "minference/error.h"

namespace minference {

MethodOption estimate_every_option() {
  return {"estimate_every",
          "rows of a prompt that one estimate serves, in whole chunks",
          2048,
          1,
          kMaxCount,
          true};
}

void fit_state(MethodState& state, const SparseIndex& index) {
  if (state.kv_lens.empty()) {
    state.index.batch = index.batch;
    state.index.q_heads = index.q_heads;
    state.index.heads.assign(index.heads.size(), {});
    state.kv_lens.assign(index.batch, 0);
    state.next_estimate.assign(index.heads.size(), 0);
    state.kept_share.assign(index.heads.size(), 0);
  }
  if (state.index.batch != index.batch || state.index.q_heads != index.q_heads) {
    throw InvalidArgument("the state is of " + std::to_string(state.index.batch) +
                          " sequences of " + std::to_string(state.index.q_heads) +
                          " query heads; the input has " + std::to_string(index.batch) + " of " +
                          std::to_string(index.q_heads));
  }
}

SharedEstimate::SharedEstimate(const AttentionInput& input, const MethodContext& context,
                               const SparseIndex& index, std::span<const SequenceGeometry> geometry,
                               std::int64_t rows)
    : state_(context.state == nullptr ? &of_this_call_ : context.state),
      is_last_(index.batch, 0),
      geometry_(geometry),
      rows_(rows) {
  fit_state(*state_, index);
  // An estimate for the whole prompt is for its last chunk, too.
  if (rows == kForever || context.rows_after.empty()) return;
  for (std::int64_t b = 0; b < index.batch; ++b) is_last_[b] = rows_after(input, context, b) == 0;
}

// Of a short prompt the new rows soon are a large part, about which the estimate knows nothing.
std::int64_t SharedEstimate::lifetime(std::int64_t estimated) const {
  constexpr std::int64_t kShareOfPrompt = 4;
  return rows_ == kForever ? rows_ : std::min(rows_, estimated / kShareOfPrompt);
}

std::vector<std::uint8_t> SharedEstimate::renew(std::span<const std::uint8_t> needed) {
  std::vector<std::uint8_t> renewed(needed.size(), 0);
  const std::int64_t heads = state_->index.q_heads;
  for (std::int64_t b = 0; b < state_->index.batch; ++b) {
    const SequenceGeometry& sequence = geometry_[b];
    if (sequence.q_len == 0) continue;
    std::int64_t& estimated = state_->kv_lens[b];
    bool stale = estimated == 0 || sequence.position(0) < estimated ||
                 sequence.kv_len - estimated >= lifetime(estimated) || is_last_[b] != 0;
    // Heads that were short enough to be dense at the time of the estimate may need one now.
    bool any = false;
    for (std::int64_t h = 0; h < heads; ++h) {
      const bool wants = needed[b * heads + h] != 0;
      any = any || wants;
      stale = stale || (wants && head(b, h).kind == HeadIndex::Kind::kDense);
    }
    if (!stale) continue;
    for (std::int64_t h = 0; h < heads; ++h) head(b, h) = {};
    estimated = any ? sequence.kv_len : 0;
    std::copy_n(needed.begin() + b * heads, heads, renewed.begin() + b * heads);
  }
  return renewed;
}

}  // namespace minference

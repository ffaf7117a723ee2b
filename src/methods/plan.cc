#include "minference/plan.h"

#include <string>
#include <utility>
#include <vector>

#include "attention/cuda/library.h"
#include "attention/validate.h"
#include "attention/visible_keys.h"
#include "methods/method_index.h"
#include "minference/error.h"

namespace minference {
namespace {

// The sizes that an index depends on.
struct Sizes {
  Device device;
  std::int64_t batch = 0;
  std::int64_t q_tokens = 0;
  std::int64_t q_heads = 0;
  std::int64_t kv_heads = 0;
  bool masked = false;
  std::vector<SequenceGeometry> sequences;

  Sizes(const AttentionInput& input, const AttentionParams& params)
      : device(input.q.device),
        batch(input.q.batch()),
        q_tokens(input.q.tokens()),
        q_heads(input.q.heads()),
        kv_heads(input.k.heads()),
        masked(!input.mask.empty()) {
    for (std::int64_t b = 0; b < batch; ++b) sequences.emplace_back(input, params, b);
  }
};

void require_same(const std::string& name, std::int64_t value, std::int64_t planned) {
  if (value == planned) return;
  throw InvalidArgument(name + " is " + std::to_string(value) + "; legal: that of the plan, " +
                        std::to_string(planned));
}

// Throws InvalidArgument unless the plan serves the input.
void require_same(const Sizes& planned, const Sizes& given) {
  if (given.device != planned.device) {
    throw InvalidArgument("q is on device " + device_name(given.device) +
                          "; legal: that of the plan, " + device_name(planned.device));
  }
  require_same("batch", given.batch, planned.batch);
  require_same("q_tokens", given.q_tokens, planned.q_tokens);
  require_same("q_heads", given.q_heads, planned.q_heads);
  require_same("kv_heads", given.kv_heads, planned.kv_heads);
  for (std::int64_t b = 0; b < planned.batch; ++b) {
    const std::string of = " of sequence " + std::to_string(b);
    require_same("q_len" + of, given.sequences[b].q_len, planned.sequences[b].q_len);
    require_same("kv_len" + of, given.sequences[b].kv_len, planned.sequences[b].kv_len);
  }
  if (given.masked != planned.masked) {
    throw InvalidArgument(given.masked ? "there is a mask; legal: none, as in the plan"
                                       : "there is no mask; legal: one, as in the plan");
  }
}

}  // namespace

struct AttentionPlan::State {
  const Method& method;
  AttentionParams params;
  Sizes sizes;
  MethodIndex found;
  std::unique_ptr<cuda::DevicePlan> device;  // null on the CPU
};

AttentionPlan::AttentionPlan(std::unique_ptr<const State> state) : state_(std::move(state)) {}
AttentionPlan::AttentionPlan(AttentionPlan&& other) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&& other) noexcept = default;
AttentionPlan::~AttentionPlan() = default;

const Stats& AttentionPlan::stats() const { return state().found.stats; }

const AttentionPlan::State& AttentionPlan::state() const {
  if (state_ == nullptr) throw InvalidArgument("the plan was moved from; legal: a plan");
  return *state_;
}

AttentionPlan plan_attention(const AttentionInput& input, const AttentionParams& params,
                             const Method& method, const MethodOptions& options,
                             const MethodContext& context) {
  validate_input(input, params);
  auto state = std::make_unique<AttentionPlan::State>(
      AttentionPlan::State{method, params, Sizes(input, params),
                           find_index(input, params, method, options, context), nullptr});
  MethodIndex& found = state->found;
  if (input.q.device.kind == Device::Kind::kCuda) {
    Stats stats;
    state->device = plan_cuda(input, params, found.source(), stats);
    found.stats.add(stats);
    found.index.reset();  // the device has a copy
  } else if (context.on_index && found.index) {
    context.on_index(*found.index);
  }
  found.stats.method = method.name();
  return AttentionPlan(std::move(state));
}

Stats execute(const AttentionPlan& plan, const AttentionInput& input,
              const AttentionOutput& output) {
  const AttentionPlan::State& state = plan.state();
  validate(input, state.params, output);
  require_same(state.sizes, Sizes(input, state.params));
  const SparseIndex* index = state.found.index ? &*state.found.index : nullptr;
  Stats stats = state.device != nullptr ? execute_cuda(*state.device, input, state.params, output)
                                        : attention(input, state.params, output, index);
  stats.method = state.method.name();
  return stats;
}

}  // namespace minference

// AttentionPlan: an index that was found once, for any number of runs of attention over it.
#pragma once

#include <memory>

#include "minference/attention.h"
#include "minference/method.h"

namespace minference {

// What plan_attention() found. It owns the index, on a CUDA device its memory there as well, which goes
// back in the order of its stream. Runs may share a plan between threads.
class AttentionPlan {
 public:
  AttentionPlan(AttentionPlan&& other) noexcept;
  AttentionPlan& operator=(AttentionPlan&& other) noexcept;
  ~AttentionPlan();

  // What finding the index took: method, seconds, the guard's figures, fallbacks. On a CUDA device
  // seconds and recalls are measured with AttentionParams::measure only. Throws InvalidArgument for a
  // plan that was moved from.
  const Stats& stats() const;

 private:
  struct State;
  explicit AttentionPlan(std::unique_ptr<const State> state);
  const State& state() const;

  friend AttentionPlan plan_attention(const AttentionInput& input, const AttentionParams& params,
                                      const Method& method, const MethodOptions& options,
                                      const MethodContext& context);
  friend Stats execute(const AttentionPlan& plan, const AttentionInput& input,
                       const AttentionOutput& output);

  std::unique_ptr<const State> state_;  // null: moved from
};

// The first half of attention(): finds the method's index for these queries and keys, and lets the
// guard look at it; values are not read. `params` are those of the runs too, the stream with them.
// Throws as attention(); on_index is shown the index at once.
AttentionPlan plan_attention(const AttentionInput& input, const AttentionParams& params,
                             const Method& method, const MethodOptions& options,
                             const MethodContext& context);

// The second half: attention over the plan's index. The tensors may be others than the plan's, and of
// other dtypes and strides, but every sequence must have as many rows and keys, the tensors as many
// heads, on the plan's device; a mask, where the plan had one. Throws InvalidArgument naming what
// differs.
Stats execute(const AttentionPlan& plan, const AttentionInput& input,
              const AttentionOutput& output);

}  // namespace minference

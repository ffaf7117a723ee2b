// SharedEstimate: one estimate for several chunks of a prompt, kept in the caller's MethodState.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention/visible_keys.h"
#include "minference/method.h"
#include "minference/sparse_index.h"

namespace minference {

// The option `estimate_every` of the methods that share estimates.
MethodOption estimate_every_option();

// Makes `state` fit the input of `index`, which has a head for every head of it: in an empty one all
// heads become dense. Throws InvalidArgument when the state is of another shape.
void fit_state(MethodState& state, const SparseIndex& index);

class SharedEstimate {
 public:
  // An estimate serves the rows of its chunk and those that follow, until `rows` more have come, or a
  // quarter of the keys that it was made from.
  static constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

  // Of `context`: a state, as fit_state(), or null: then every chunk is estimated anew; and the rows
  // that are still to come, where they are known: a prompt's last chunk, where questions stand, gets
  // an estimate of its own.
  SharedEstimate(const AttentionInput& input, const MethodContext& context,
                 const SparseIndex& index, std::span<const SequenceGeometry> geometry,
                 std::int64_t rows);
  SharedEstimate(const SharedEstimate&) = delete;
  SharedEstimate& operator=(const SharedEstimate&) = delete;

  // Of the heads that need an estimate, [batch * q_heads], those that have to be estimated from this
  // chunk: all of a sequence's or none. Forgets what is remembered of them. Rows from before the end
  // of what was estimated begin another prompt, which needs an estimate of its own.
  std::vector<std::uint8_t> renew(std::span<const std::uint8_t> needed);

  // Makes renew() estimate a sequence anew.
  void forget(std::int64_t b) { state_->kv_lens[b] = 0; }

  // Where it is all kept.
  MethodState& state() { return *state_; }

  // What is remembered of a head; dense: nothing. renew()ed ones are to be written.
  HeadIndex& head(std::int64_t b, std::int64_t h) { return state_->index.head(b, h); }

 private:
  std::int64_t lifetime(std::int64_t estimated) const;

  MethodState of_this_call_;
  MethodState* state_;
  std::vector<std::uint8_t> is_last_;  // [batch] whether the chunk is known to be the prompt's last
  std::span<const SequenceGeometry> geometry_;
  std::int64_t rows_;
};

}  // namespace minference

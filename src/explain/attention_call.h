// AttentionCall: what a host shows of a call of attention that it has made.
#pragma once

#include <cstdint>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference::explain {

// A call of causal prompt attention. Everything is valid while it is shown only.
struct AttentionCall {
  std::int64_t layer = -1;                // -1: not known
  const AttentionInput* input = nullptr;  // one sequence
  const AttentionParams* params = nullptr;
  const SparseIndex* index = nullptr;  // null: exact attention that no method was asked for
};

}  // namespace minference::explain

// MethodIndex: what a method decided about a call, before attention.
#pragma once

#include <optional>

#include "attention/cuda/library.h"
#include "minference/method.h"

namespace minference {

struct MethodIndex {
  // Both empty: exact attention.
  std::optional<SparseIndex> index;
  std::optional<IndexRecipe> recipe;  // on a CUDA device, which has still to follow it
  GuardOptions guard;                 // that has still to look at the index, there
  Stats stats;                        // of the work so far, and fallbacks

  // For the device, which must not outlive this.
  cuda::IndexSource source() const {
    return {index ? &*index : nullptr, recipe ? &*recipe : nullptr, guard};
  }
};

// For validated input and any options and context of attention().
MethodIndex find_index(const AttentionInput& input, const AttentionParams& params,
                       const Method& method, const MethodOptions& options,
                       const MethodContext& context);

}  // namespace minference

// The CPU executor: dense and sparse attention over packed tiles, at a given ISA level.
#pragma once

#include "minference/attention.h"
#include "minference/isa.h"

namespace minference {

// attention() at `level`, which must be available. Inputs and index must have been validated.
Stats attention_cpu(const AttentionInput& input, const AttentionParams& params,
                    const AttentionOutput& output, const SparseIndex* index, IsaLevel level);

}  // namespace minference

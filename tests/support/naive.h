// Attention as a beginner would write it in f32 or bf16: the yardstick of rounding error.
#pragma once

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference::test {

// Over the same explicit mask as the reference, with every sum in f32. With `bf16`, q, k, v and
// the exponentials are rounded to bf16 before they are multiplied, as matrix units do.
void naive_attention(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const SparseIndex* index, bool bf16);

}  // namespace minference::test

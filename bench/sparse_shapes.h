// Sparse indices of a wanted density, for measuring the kernels apart from any method's choice.
#pragma once

#include "bench/attention_problem.h"
#include "minference/method.h"
#include "minference/sparse_index.h"

namespace minference::bench {

// Sizes of vertical_slash, in the proportion of `sizes`, with which it keeps about `fraction` of
// the causal area of the problem's first head. The columns and offsets that it keeps anyway are the
// least that it can keep.
MethodOptions vertical_slash_sizes(AttentionProblem& problem, const MethodOptions& sizes,
                                   double fraction);

// Block form that keeps about `fraction`: in each row block the block of its own position, the
// first one, and others at random.
SparseIndex random_blocks(const ProblemShape& shape, double fraction);

}  // namespace minference::bench

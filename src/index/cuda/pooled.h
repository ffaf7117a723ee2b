// The selection of block_sparse on the device: the key blocks whose means match each row block best.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/problem.h"
#include "index/cuda/head_plan.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/pooled_scores.h"

namespace minference::cuda {

using PooledPlan = PooledScores;

PooledPlan plan_pooled(const Problem& problem, MemoryPieces& workspace);

// Enqueues, for every head whose kind is kBlockSparse: per row block the diagonal, block 0 and the
// blocks whose mean scores highest against the mean query, top_k in all where that is more. A head that
// keeps everything, or more than it has room for, becomes dense.
void build_pooled_heads(const Problem& problem, const IndexArrays& arrays, const PooledPlan& plan,
                        int top_k, cudaStream_t stream);

}  // namespace minference::cuda

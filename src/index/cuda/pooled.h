// Mean queries and mean keys of blocks, and the key blocks that match each row block best.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/block_rows.h"
#include "index/cuda/head_plan.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

// Means in twice 8 bits of mantissa: rounded, and what rounding left. Their products are nearly those
// of f32, on tensor cores. [batch][heads][blocks][dim].
struct Means {
  __nv_bfloat16* high = nullptr;
  __nv_bfloat16* low = nullptr;
  int heads = 0;
  int blocks = 0;
};

struct PooledPlan {
  KeptBlocks kept;
  int heads = 0;   // that are worked on at a time
  int rows = 0;    // row blocks of each, likewise; a multiple of 64
  int stride = 0;  // scores of a row block
  Means queries;
  Means keys;
  float* scores = nullptr;  // [heads][rows][stride]
};

PooledPlan plan_pooled(const Problem& problem, int block_size, MemoryPieces& workspace);

// Enqueues, for every head whose kind is kBlockSparse: per row block the diagonal, block 0 and the
// blocks whose mean scores highest against the mean query, top_k in all where that is more.
void build_pooled_heads(const Problem& problem, const IndexArrays& arrays, const PooledPlan& plan,
                        int top_k, cudaStream_t stream);

}  // namespace minference::cuda

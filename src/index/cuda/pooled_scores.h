// Mean queries and mean keys of blocks, and their scores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/head_plan.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

// Means in twice 8 bits of mantissa: rounded, and what rounding left. Their products are nearly those
// of f32, on tensor cores. [heads][blocks][dim], each part after the other.
struct Means {
  __nv_bfloat16* high = nullptr;
  __nv_bfloat16* low = nullptr;
  int blocks = 0;
};

// Which of the query heads take part: by kind, or by a flag of each in the whole batch.
struct HeadFilter {
  const HeadPlan* plans = nullptr;
  const int* flags = nullptr;

#ifdef __CUDACC__
  __device__ bool wants(int head, int q_heads) const {
    if (flags != nullptr) return flags[head] != 0;
    return plans[head % q_heads].kind == HeadPattern::Kind::kBlockSparse;
  }
#endif
};

struct PooledScores {
  int block_size = 0;
  int row_blocks = 0;       // of a head
  int heads = 0;            // that are worked on at a time
  int rows = 0;             // row blocks of each, likewise; a multiple of 64
  int stride = 0;           // scores of a row block
  Means queries;            // of those heads
  Means keys;               // of all KV heads
  float* scores = nullptr;  // [heads][rows][stride]
};

// About `bytes` of scores, but at least those of 64 row blocks of one head.
PooledScores plan_pooled_scores(const Problem& problem, int block_size, std::int64_t bytes,
                                MemoryPieces& workspace);

// Enqueues the means of all keys; those of the queries of heads [first, first + count), numbered over the
// whole batch; and the scores of these heads' row blocks [first_row, first_row + rows).
void pool_keys(const Problem& problem, const PooledScores& plan, cudaStream_t stream);
void pool_queries(const Problem& problem, const PooledScores& plan, const HeadFilter& filter,
                  int first, int count, cudaStream_t stream);
void score_means(const Problem& problem, const PooledScores& plan, const HeadFilter& filter,
                 int first, int count, int first_row, int rows, cudaStream_t stream);

}  // namespace minference::cuda

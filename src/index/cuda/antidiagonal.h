// Antidiagonal estimator on the device, and the key blocks that hold a share of what it estimates.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/block_bits.h"
#include "index/cuda/cell_scores.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

struct AntidiagonalPlan {
  CellScores cells;
  int block_cells = 0;  // cells along a block
  int rows = 0;         // row blocks worked on at a time
  int key_blocks = 0;   // room for those of a row block
  // [heads][rows][key_blocks], shares of kWholeWeight; null: few enough for shared memory.
  std::uint32_t* mass = nullptr;
};

AntidiagonalPlan plan_antidiagonals(const Problem& problem, int block_size, int stride, float norm,
                                    MemoryPieces& workspace);

// Enqueues, for every head: per row block the diagonal, block 0 and the heaviest blocks until they hold
// `threshold` of its mass.
void build_antidiagonal_heads(const Problem& problem, const AntidiagonalPlan& plan,
                              double threshold, const BlockBits& bits, cudaStream_t stream);

}  // namespace minference::cuda

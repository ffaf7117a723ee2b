// What the last rows of a sequence say about its key blocks: index/last_q_blocks.h on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/cell_scores.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

// Masses of every head, in shares of kWholeWeight, each [batch][q_heads][key_blocks].
struct BlockMasses {
  int key_blocks = 0;
  std::uint32_t* columns = nullptr;
  std::uint32_t* diagonals = nullptr;
};

BlockMasses allocate_block_masses(const Problem& problem, int block_size, MemoryPieces& workspace);

struct LastRowsPlan {
  CellScores scores;
  // Of each row and key block the share of the row's attention that is in the farther of the block's two
  // blocks of offsets, and in the nearer one. [heads][rows][key_blocks]
  float2* shares = nullptr;
};

LastRowsPlan plan_last_rows_masses(const Problem& problem, int block_size, std::int64_t bytes,
                                   MemoryPieces& workspace);

// Enqueues the masses of all heads.
void estimate_last_rows(const Problem& problem, const LastRowsPlan& plan, int block_size,
                        const BlockMasses& masses, cudaStream_t stream);

}  // namespace minference::cuda

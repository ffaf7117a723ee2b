// From the key blocks that row blocks keep, one bit each, to the block form of a DeviceIndex.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/head_plan.h"

namespace minference::cuda {

// Bits of some query heads: of head i of these and row block m, [words] from (i * rows + m) * words
// on. Bits of what a row block does not see, and whole row blocks behind the last one, are undefined.
struct KeptBlocks {
  std::uint32_t* bits = nullptr;
  int rows = 0;   // per head
  int words = 0;  // per row
  int block_size = 0;
};

KeptBlocks plan_kept_blocks(const Problem& problem, int block_size);

// Enqueues the block form of heads [first, first + count), numbered over the whole batch, whose kind is
// kBlockSparse; the others stay as they are. A head that keeps everything, or more than it has room
// for, becomes dense.
void write_block_heads(const Problem& problem, const IndexArrays& arrays, const KeptBlocks& kept,
                       int first, int count, cudaStream_t stream);

}  // namespace minference::cuda

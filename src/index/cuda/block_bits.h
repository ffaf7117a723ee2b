// The block form of an index as bits: key blocks that row blocks keep, for heads that may keep many.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

struct BlockBits {
  int block_size = 0;
  int rows = 0;  // row blocks of a head
  int words = 0;
  DeviceHead* heads = nullptr;    // [batch][q_heads]
  std::uint32_t* bits = nullptr;  // [batch][q_heads][rows][words]
  int* leaves_out = nullptr;      // [batch][q_heads]: whether some visible block is not kept

  DeviceIndex index() const {
    DeviceIndex result;
    result.heads = heads;
    result.block_bits = bits;
    result.block_pairs = block_size % kTileRows == 0;
    return result;
  }

#ifdef __CUDACC__
  // Of head i of the whole batch.
  __device__ std::uint32_t* row(int i, int m) const {
    return bits + (static_cast<std::int64_t>(i) * rows + m) * words;
  }
#endif
};

BlockBits plan_block_bits(const Problem& problem, int block_size, MemoryPieces& workspace);

// Enqueues what must happen before bits are written and `leaves_out` is set, and after: heads that leave
// nothing out become dense.
void begin_block_bits(const Problem& problem, const BlockBits& bits, cudaStream_t stream);
void finish_block_bits(const Problem& problem, const BlockBits& bits, cudaStream_t stream);

}  // namespace minference::cuda

// Per head columns and diagonals of blocks, or a map of pooled scores: flexprefill's choice on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/block_bits.h"
#include "index/cuda/last_rows.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/pooled_map.h"
#include "minference/index_recipe.h"

namespace minference::cuda {

struct FlexPrefillPlan {
  BlockMasses masses;
  float* pooled = nullptr;             // [batch][q_heads][key_blocks]: of the last queries' mean
  int* query_aware = nullptr;          // [batch][q_heads]
  std::uint32_t* columns = nullptr;    // [batch][q_heads][words]: bits of key blocks
  std::uint32_t* diagonals = nullptr;  // likewise, of blocks of offsets
  LastRowsPlan estimate;               // in the same memory as the map
  PooledMap map;
};

FlexPrefillPlan plan_flexprefill(const Problem& problem, const FlexPrefillRule& rule,
                                 MemoryPieces& workspace);

// Enqueues the index of every head.
void build_flexprefill_heads(const Problem& problem, const FlexPrefillPlan& plan,
                             const FlexPrefillRule& rule, const BlockBits& bits,
                             cudaStream_t stream);

}  // namespace minference::cuda

// A map of pooled scores: of the softmax of all row blocks of a head together, the heaviest entries that
// hold a share of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/block_bits.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/pooled_scores.h"

namespace minference::cuda {

// Where the weights are cut, found digit by digit from sums; all zero before the first kernel.
struct MapCut {
  static constexpr int kPasses = 3;
  static constexpr int kBins = 2048;

  unsigned long long sums[kPasses][kBins];  // of weights, by digit
  unsigned long long wanted;                // of those that share the digits so far
  std::uint32_t weight;                     // digits so far; in the end as in Cover
  int ties;
  int finished[kPasses];  // thread blocks
};

struct PooledMap {
  PooledScores scores;
  MapCut* cuts = nullptr;  // [heads]
  int* ties = nullptr;     // [heads][row blocks]: entries of the weight where the cut is
};

PooledMap plan_pooled_map(const Problem& problem, int block_size, std::int64_t bytes,
                          MemoryPieces& workspace);

// Enqueues, for heads whose flag [batch][q_heads] is not 0: as bits the fewest entries that hold `share` of
// the map. The means of the keys must have been pooled.
void write_pooled_map(const Problem& problem, const PooledMap& plan, const int* flags, double share,
                      const BlockBits& bits, cudaStream_t stream);

}  // namespace minference::cuda

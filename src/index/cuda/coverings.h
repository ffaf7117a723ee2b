// Coverings on the device: of each head, what is worth offering of columns and boxes for their cost; and
// which offers the heads of a sequence take together. As index/covering.h and index/allocate.h, with
// offers of their own: sets of distances whose density of mass lies above one of 512 steps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/box_costs.h"
#include "index/cuda/coverage.h"
#include "index/cuda/memory_pieces.h"
#include "minference/index_recipe.h"

namespace minference::cuda {

// Steps of density, eight an octave.
inline constexpr int kDensitySteps = 512;
inline constexpr int kOffers = (kMassClasses - 1) * kDensitySteps;
// Of a head's offers, the cheapest for each eighth of an octave of loss, down to 2^-16.
inline constexpr int kLossLevels = 128;
inline constexpr std::int32_t kDenseOffer = -1;

struct CoveringTables {
  float* losses = nullptr;  // [heads][kOffers]: share of the mass that is lost
  unsigned long long* best =
      nullptr;                     // [heads][kLossLevels]: cost (high half) and offer, or all ones
  float2* levels = nullptr;        // [heads][kLossLevels]: cost and loss
  std::int32_t* chosen = nullptr;  // [heads]: class - 1, times kDensitySteps, plus least step
};

struct CoveringRule {
  CoverageRule rule;
  BoxCosts costs;
  std::int32_t column_room = 0;  // of a head
};

CoveringTables allocate_coverings(const Problem& problem, MemoryPieces& workspace);

// Enqueues the choice, from the tables of estimate_coverage().
void choose_coverings(const Problem& problem, const CoveragePlan& plan, const std::uint8_t* wanted,
                      const CoverageTables& masses, const CoveringRule& rule,
                      const CoveringTables& tables, cudaStream_t stream);

}  // namespace minference::cuda

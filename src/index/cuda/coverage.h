// Coverage estimator on the device: where the mass of rows spread over a chunk lies, by class of key and
// by distance, as index/coverage.h.
//
// Rows are taken in two halves, every other one, and a key's class is what the other half says of it: a
// key or distance that is heavy by chance in few rows is not heavy in the others, and what a set keeps
// of rows that it was not chosen by is what it keeps of all rows.
//
// Distances are counted in boxes of kBoxKeys keys from a row block's own (distance 0) backwards: what
// the executors load. Boxes are cut so that those of row blocks are whole: they begin
// box_shift(geometry) keys before key 0. Masses are fixed-point numbers, so that sums do not depend on
// their order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/coverage.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/row_pass.h"

namespace minference::cuda {

// As on the CPU, but for the last ones, which are one class here.
inline constexpr int kMassClasses = 7;
inline constexpr int kHalves = 2;
// The unit of masses: all that rows can have at one distance is below 2^32.
inline constexpr float kMassUnit = 1.0F / (1 << 25);

// Of the row block of row 0: its first position is a multiple of kBoxKeys when so many keys are put
// before key 0.
MINFERENCE_HOST_DEVICE inline int box_shift(const Geometry& geometry) {
  return -geometry.position(0) & (kBoxKeys - 1);
}

// The row of a chunk in a slot of the estimate, ascending; -1: there is none. Rows are spread evenly, as
// on the CPU; where there are enough, each stands elsewhere in its row block: boxes that only its last
// rows reach must not be overlooked.
MINFERENCE_HOST_DEVICE inline int spread_row(int q_len, int rows, int slot) {
  const int count = rows < q_len ? rows : q_len;
  if (slot >= count) return -1;
  const auto row =
      static_cast<int>(static_cast<std::int64_t>(q_len) * (2 * slot + 1) / (2 * count));
  if (q_len < count * kGroupRows) return row;
  constexpr int kStep = 29;  // has no factor in common with a row block's rows
  const int moved = row / kGroupRows * kGroupRows + slot * kStep % kGroupRows;
  return moved < q_len ? moved : q_len - 1;
}

struct CoveragePlan : RowPassPlan {
  int rows = kPassRows;          // of a sequence, spread evenly
  std::int64_t distances = 0;    // room for a head's
  std::int64_t class_bytes = 0;  // the same, for the classes of its keys
};

// Of every head [batch][q_heads].
struct CoverageTables {
  float2* partials = nullptr;            // [chunks][64]: maximum and sum of exponentials, base 2
  float* sinks = nullptr;                // [64][kSinks]: scores of the first keys, base 2
  std::uint32_t* by_distance = nullptr;  // [kHalves][kMassClasses][distances], in kMassUnit
  // Keys of a class (by both halves), and rows of the chunk that see them in all.
  std::uint32_t* keys_of_class = nullptr;       // [kMassClasses]
  unsigned long long* rows_of_class = nullptr;  // [kMassClasses]
  // Byte 8 * s + g: classes, by both halves, of keys 16 * s + g (low bits) and 16 * s + g + 8, counted
  // from box_shift() keys before key 0.
  std::uint8_t* classes = nullptr;
};

CoveragePlan plan_coverage(const Problem& problem, int rows);
CoverageTables allocate(const Problem& problem, const CoveragePlan& plan, MemoryPieces& workspace);

// Enqueues the estimate. `wanted` [batch * q_heads], on the device: heads with 0 are left out; sequences
// of the others have no fewer keys than queries.
void estimate_coverage(const Problem& problem, const CoveragePlan& plan, const std::uint8_t* wanted,
                       const CoverageTables& tables, cudaStream_t stream);

}  // namespace minference::cuda

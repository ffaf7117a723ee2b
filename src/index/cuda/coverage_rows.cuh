// SpreadRows: which rows of a chunk the coverage estimate looks at.
#pragma once

#include <climits>

#include "index/cuda/coverage.h"
#include "index/cuda/row_pass_task.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::row_pass {

struct CoverageArguments : Arguments {
  CoverageTables tables;
  std::int64_t distances = 0;
  std::int64_t class_bytes = 0;
};

struct SpreadRows {
  struct Shared {
    int positions[kPassRows];  // ascending; -1: there is no such row
    int boxes[kPassRows];      // number of the row block's own box
    int last_of_octet[8];      // positions
    int first_position;        // of the rows that there are
    int last_position;
    int q_len;
    float left[kMaxHeads][2];  // mass beside the sinks, by warp
    std::uint32_t keys_of_class[kMaxHeads][kMassClasses];
    unsigned long long rows_of_class[kMaxHeads][kMassClasses];
  };

  static constexpr bool kSpreadRanges = true;

  __device__ static int keys_before(const Geometry& geometry) { return box_shift(geometry); }

  __device__ static int row(const Arguments& a, const Geometry& geometry, int slot) {
    return spread_row(geometry.q_len, a.rows, slot);
  }

  __device__ static int first_octet(const Shared& shared, int first_key, int octet) {
    while (octet < 8 && shared.last_of_octet[octet] < first_key) ++octet;
    return octet;
  }

  __device__ static void prepare(const Arguments& a, const Geometry& geometry, Shared& shared) {
    const int slot = static_cast<int>(threadIdx.x);
    const int first = geometry.position(0) + box_shift(geometry);
    if (slot < kPassRows) {
      const int r = row(a, geometry, slot);
      shared.positions[slot] = r < 0 ? -1 : geometry.position(r);
      shared.boxes[slot] = r < 0 ? 0 : first / kBoxKeys + r / kGroupRows;
      const int last = row(a, geometry, min(slot | 7, min(a.rows, geometry.q_len) - 1));
      if (slot % 8 == 0) shared.last_of_octet[slot / 8] = r < 0 ? -1 : geometry.position(last);
      if (slot == 0) {
        shared.first_position = shared.positions[0];
        shared.q_len = geometry.q_len;
      }
      if (slot == min(a.rows, geometry.q_len) - 1) shared.last_position = shared.positions[slot];
    }
    if (slot < kMaxHeads * kMassClasses) {
      shared.keys_of_class[slot / kMassClasses][slot % kMassClasses] = 0;
      shared.rows_of_class[slot / kMassClasses][slot % kMassClasses] = 0;
    }
  }

  template <class Hide>
  __device__ static void for_each_hidden(const Geometry& geometry, const Shared& shared,
                                         int first_key, int octet, Hide&& hide) {
    const int* positions = shared.positions + lane() % 4 * 2;
    const int window = geometry.window == 0 ? INT_MAX : geometry.window;
    int keys[2];
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + i * 8 + lane() / 4;
      keys[i] = key < 0 ? INT_MAX : key;  // seen by nobody
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < octet) continue;
      const int2 position = *reinterpret_cast<const int2*>(positions + 8 * j);
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; ++n) {
        const int distance = (n % 2 == 0 ? position.x : position.y) - keys[n / 2 % 2];
        if (distance < 0 || distance >= window) hide(n);
      }
    }
  }

  // Slots without a row count nowhere.
  __device__ static bool all_see(const Geometry& geometry, const Shared& shared, int first_key) {
    return first_key >= 0 && first_key + kStepKeys <= shared.first_position + 1 &&
           (geometry.window == 0 || first_key > shared.last_position - geometry.window);
  }
};

}  // namespace minference::cuda::row_pass

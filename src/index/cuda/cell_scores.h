// Scores of cells, groups of some query rows against groups of as many keys, summed up as exponentials.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/problem.h"
#include "index/cuda/memory_pieces.h"

namespace minference::cuda {

// Cell (a, c) of a head stands for rows [a * stride, (a + 1) * stride) of the chunk and keys
// [c * stride, (c + 1) * stride); its score is the sum of the scores on its antidiagonal, as in
// index/antidiagonal.h. What is kept of a row of cells is, of each `slot` cells one after the other, the
// logarithm to base 2 of the sum of 2^(score * log2(e)), over the cells of which some pair is visible.
struct CellScores {
  // Cells of the largest tile: the sums have room for whole tiles on every device.
  static constexpr int kTileRows = 128;
  static constexpr int kTileColumns = 256;
  static constexpr int kStages = 4;      // tiles of 64 dims in flight
  static constexpr int kSplitSlot = 64;  // of which all sizes of blocks are multiples

  int stride = 1;
  int last_rows = 0;  // 0, or: the rows are the last so many of each sequence
  // 0, or keys of a block, and there are two sums of a slot: of the keys whose place in their block is at
  // most that of the row's own position in its, and of the others. They belong to two blocks of offsets.
  int split = 0;
  float scale = 0;        // of a cell's score
  int slot = 16;          // a power of 2 up to 16; with `split` kSplitSlot
  int slots = 0;          // of a row of cells
  int heads = 0;          // that are worked on at a time
  int rows = 0;           // of each, a multiple of kTileRows
  float* sums = nullptr;  // [heads][rows][slots], split: [2]

  MINFERENCE_HOST_DEVICE std::int64_t row_sums() const {
    return static_cast<std::int64_t>(slots) * (split != 0 ? 2 : 1);
  }
  MINFERENCE_HOST_DEVICE int cells(int tokens) const { return (tokens + stride - 1) / stride; }
};

// `unit`: cells that go together, along rows and along columns; `norm` divides the scores. Takes the
// sums' memory: about `bytes`, but at least for `unit` rows of one head. Asks no device.
CellScores plan_cell_scores(const Problem& problem, int stride, int unit, float norm,
                            std::int64_t bytes, MemoryPieces& workspace);

// The same of single rows and keys: the last `block_size` rows of each sequence, sums split by blocks of
// so many keys.
CellScores plan_last_rows(const Problem& problem, int block_size, std::int64_t bytes,
                          MemoryPieces& workspace);

// Enqueues the sums of rows [first_row, first_row + rows) of cells, or of all last rows, of heads [first_head, first_head +
// heads), numbered over the whole batch. Both are at most what the plan says.
void score_cells(const Problem& problem, const CellScores& plan, int first_head, int heads,
                 int first_row, int rows, cudaStream_t stream);

#ifdef __CUDACC__
// The first of the rows of a launch from `first_row` on.
__device__ inline int first_cell(const CellScores& plan, const Geometry& geometry, int first_row) {
  return plan.last_rows != 0 ? max(geometry.q_len - plan.last_rows, 0) : first_row;
}

// Cells of keys that the rows of cell `a`, or of cells up to `last`, may see.
struct CellRange {
  int begin = 0;
  int end = 0;

  __device__ CellRange(const Geometry& geometry, int stride, int a, int last)
      : begin(geometry.first_key(a * stride) / stride),
        end((geometry.end_key(min((last + 1) * stride, geometry.q_len) - 1) + stride - 1) /
            stride) {}
};
#endif

}  // namespace minference::cuda

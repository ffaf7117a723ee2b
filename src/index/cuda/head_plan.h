// HeadPlan: what the host knows of each query head's part of an index, on its way to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "index/cuda/memory_pieces.h"
#include "minference/pattern.h"

namespace minference::cuda {

// Of one query head, the same for every sequence. The places count within what a sequence has.
struct HeadPlan {
  HeadPattern::Kind kind = HeadPattern::Kind::kVerticalSlash;
  std::int32_t vertical = 0;
  std::int32_t slash = 0;
  std::int32_t block_ids = 0;  // room
  std::int64_t column_begin = 0;
  std::int64_t run_begin = 0;
  std::int64_t list_begin = 0;
  std::int64_t block_row_begin = 0;
  std::int64_t block_id_begin = 0;
};

// The arrays of a DeviceIndex while it is built, and what one sequence has of each.
struct IndexArrays {
  DeviceHead* heads = nullptr;  // [batch][q_heads]
  std::int32_t* columns = nullptr;
  DeviceRun* runs = nullptr;
  std::int32_t* lists = nullptr;  // scratch of the diagonal form
  std::int32_t* block_rows = nullptr;
  std::int32_t* block_ids = nullptr;
  HeadPlan* plans = nullptr;  // [q_heads]
  std::int64_t columns_of_sequence = 0;
  std::int64_t runs_of_sequence = 0;
  std::int64_t lists_of_sequence = 0;
  std::int64_t block_rows_of_sequence = 0;
  std::int64_t block_ids_of_sequence = 0;

  DeviceIndex index(int batch) const {
    DeviceIndex result;
    result.heads = heads;
    result.runs = runs;
    result.columns = columns;
    result.block_rows = block_rows;
    result.block_ids = block_ids;
    result.column_capacity = columns_of_sequence * batch;
    return result;
  }
};

// Block 0 and the diagonal, which may straddle two blocks, are kept whatever an estimate says.
inline constexpr std::int64_t kForcedBlocks = 3;

// Room for a head of the block form: at most `blocks` key blocks in each of its row blocks.
void add_block_head(const Problem& problem, std::int64_t blocks, HeadPlan& plan,
                    IndexArrays& arrays);

// Takes the arrays, once all heads are planned.
void allocate(const Problem& problem, MemoryPieces& workspace, IndexArrays& arrays);

// Enqueues the upload of the plans. They travel as parameters of kernels, so that a graph may hold
// the upload.
void upload_plans(const std::vector<HeadPlan>& plans, HeadPlan* to, cudaStream_t stream);

}  // namespace minference::cuda

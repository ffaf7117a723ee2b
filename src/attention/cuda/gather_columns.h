// Gathers the keys and values of an index's columns, once a head, so that they stream like any other.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"

namespace minference::cuda {

// Keys and values of an index's columns: row i belongs to DeviceIndex::columns[i].
struct GatheredColumns {
  char* keys = nullptr;    // [column_capacity, dim], dense
  char* values = nullptr;  // [column_capacity, v_dim], dense

  // Bytes that the two take together.
  static std::int64_t bytes(const Problem& problem, const DeviceIndex& index) {
    return index.column_capacity * (problem.dim + problem.v_dim) * dtype_size(problem.k.dtype);
  }
};

// Rows past a head's columns, up to a multiple of kBoxKeys, become 0. For tensors that
// sm90_takes(), with an index that has columns.
void gather_columns(const Problem& problem, const DeviceIndex& index,
                    const GatheredColumns& columns, cudaStream_t stream);

}  // namespace minference::cuda

// The guard on the device: what share of the softmax mass an index keeps, on sampled query rows.
//
// As guard.h: the exact softmax of a few rows of every head, and which of its keys the index keeps by
// the rules that the executors follow. Nothing is read back by the host, not even to make heads dense.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "guard/row_sample.h"
#include "index/cuda/build_index.h"

namespace minference::cuda {

// Device memory that measure_recall() needs.
std::int64_t recall_bytes(const Problem& problem, const RowSample& sample);

// Enqueues the measurement: recall [batch * q_heads] gets the mean over the sampled rows that see
// anything of the mass on keys that the index keeps; 1 for dense heads and where no row sees anything.
// Where `guarded` [batch * q_heads] is not null, it gets the heads of the index, dense those whose
// recall is below `least`. The index must have heads. Products are of f16 if q and k are both, of bf16
// otherwise. Throws InvalidArgument for a workspace that is too small.
void measure_recall(const Problem& problem, const DeviceIndex& index, const RowSample& sample,
                    float least, float* recall, DeviceHead* guarded,
                    const IndexWorkspace& workspace, cudaStream_t stream);

}  // namespace minference::cuda

// The sm_90a executor: exact and sparse attention on Hopper's bulk copies and warpgroup products.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/device_index.h"
#include "attention/cuda/gather_columns.h"
#include "attention/cuda/problem.h"

namespace minference::cuda {

// Whether the executor takes these tensors: q, k and v of one 16-bit type, not paged, with strides
// and addresses that bulk copies can follow (multiples of 16 bytes, positive). Others are the
// sm_80 executor's.
bool sm90_takes(const Problem& problem);

// Enqueues the attention. `columns` holds the index's columns, gathered before in the same stream;
// `tickets` are kTickets ints of device memory.
void sm90_attention(const Problem& problem, const DeviceIndex& index,
                    const GatheredColumns& columns, int* tickets, cudaStream_t stream);

}  // namespace minference::cuda

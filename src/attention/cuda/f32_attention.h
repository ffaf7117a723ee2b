// The f32 executor: attention with products of f32 on any GPU, without tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"

namespace minference::cuda {

// Enqueues the attention. `ticket` is an int of device memory for its own use.
void f32_attention(const Problem& problem, const DeviceIndex& index, int* ticket,
                   cudaStream_t stream);

// The same for those tiles alone whose output holds a NaN or infinity, and only where *needed is not
// 0. A hidden key has weight 0, and 0 * NaN is NaN: in products of whole boxes such a value reaches
// rows that do not see it, in these it does not. Counts no pairs. `ticket` is 0 already.
void repair_non_finite(const Problem& problem, const DeviceIndex& index, const int* needed,
                       int* ticket, cudaStream_t stream);

}  // namespace minference::cuda

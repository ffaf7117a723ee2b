// The sm_80 executor: exact and sparse attention on every GPU from sm_80 on, for any tensors.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"

namespace minference::cuda {

// Enqueues the attention, whatever the dtypes, strides, pages and head dims up to 256. Products are
// of f32 where q, k and v all are; of f16 where they all are; of bf16 otherwise.
void sm80_attention(const Problem& problem, const DeviceIndex& index, int* tickets,
                    cudaStream_t stream);

}  // namespace minference::cuda

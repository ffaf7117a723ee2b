// check(): turns a CUDA error code into an exception; and what kernels' hosts ask of the device.
#pragma once

#include <cuda_runtime_api.h>

namespace minference::cuda {

// Throws Error (out of memory, or a failure of the device) saying what was being done.
void check(cudaError_t code, const char* doing);

// Multiprocessors of the current device.
int multiprocessors();

}  // namespace minference::cuda

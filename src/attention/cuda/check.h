// check(): turns a CUDA error code into an exception; and what kernels' hosts ask of the device.
#pragma once

#include <cuda_runtime_api.h>

namespace minference::cuda {

// Throws Error (out of memory, or a failure of the device) saying what was being done.
void check(cudaError_t code, const char* doing);

// An attribute of the current device, asked for once.
int device_attribute(cudaDeviceAttr attribute);

// Multiprocessors of the current device.
int multiprocessors();

// Lets the current device start `kernel` with so many bytes of dynamic shared memory; remembers what
// it was told.
void allow_shared_memory(const void* kernel, int bytes);

}  // namespace minference::cuda

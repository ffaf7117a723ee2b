// MINFERENCE_HOST_DEVICE: marks functions that CUDA kernels call too.
#pragma once

#ifdef __CUDACC__
#define MINFERENCE_HOST_DEVICE __host__ __device__
#else
#define MINFERENCE_HOST_DEVICE
#endif

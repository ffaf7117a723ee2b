// send(): a few host values to the device, as parameters of a kernel.
//
// Faster than a copy of pageable memory, and a CUDA graph that is captured meanwhile keeps the values,
// where of a copy it would keep the address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace minference::cuda {

// Enqueues the write of `bytes`, a multiple of 4, at `from` to `to`, device memory aligned to 4 bytes;
// `from` has been read when this returns. One launch for each kSendBytes.
inline constexpr std::int64_t kSendBytes = 4000;  // of the 4 KiB that parameters may take
void send(const void* from, std::int64_t bytes, void* to, cudaStream_t stream);

}  // namespace minference::cuda

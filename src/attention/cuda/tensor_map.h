// Descriptions of tensors for Hopper's copy engine.
#pragma once

#include <cuda.h>

#include "attention/cuda/problem.h"

namespace minference::cuda {

// Of 16-bit elements at tensor.data, fetched in boxes with the 128-byte swizzle; what lies outside arrives
// as 0. Axes innermost first, `strides` in bytes without that of axis 0. Throws Unsupported when the
// driver has no tensor maps or refuses this one.
CUtensorMap encode_tensor_map(const DeviceTensor& tensor, int axes, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box);

}  // namespace minference::cuda

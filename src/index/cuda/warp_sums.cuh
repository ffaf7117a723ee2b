// Sums and maxima over a warp, in every lane.
#pragma once

#include <cstdint>

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"

namespace minference::cuda {

__device__ inline std::uint32_t warp_sum(std::uint32_t value) {
  return __reduce_add_sync(~0U, value);
}

__device__ inline float warp_total(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  return value;
}

__device__ inline float warp_maximum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0U, value, distance));
  }
  return value;
}

// Executed by a warp: the logarithm to base 2 of the sum of 2^x over sums[begin ... end); infinity when
// that is 0, so that every share of it is 0.
__device__ inline float log_of_sums(const float* sums, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float highest = -kInfinity;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) highest = fmaxf(highest, sums[i]);
  highest = warp_maximum(highest);
  if (highest == -kInfinity) return kInfinity;
  float total = 0.0F;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) total += exp2_fast(sums[i] - highest);
  return highest + log2f(warp_total(total));
}

}  // namespace minference::cuda

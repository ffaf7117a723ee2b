// What the softmaxes of all kernels share: constants, and the soft cap.
#pragma once

#include <cmath>

#include "attention/cuda/ptx.cuh"

namespace minference::cuda {

inline constexpr float kInfinity = INFINITY;
inline constexpr float kLog2E = 1.4426950408889634F;
// The sums are rescaled only when a row's maximum has grown by more than this power of 2: until then
// weights stay below 2^8, which no type overflows.
inline constexpr float kRescaleThreshold = 8.0F;

// The soft cap of a product x is cap * tanh(scale * x / cap), by tanh(y) = 1 - 2 / (1 + e^2y).
__device__ inline float soft_cap_exponent(float cap, float scale) {
  return 2 * kLog2E * scale / cap;
}
__device__ inline float soft_capped(float product, float cap, float exponent) {
  return cap * (1 - __fdividef(2.0F, 1 + exp2_fast(product * exponent)));
}

}  // namespace minference::cuda

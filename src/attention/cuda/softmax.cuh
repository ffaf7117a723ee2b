// Constants that the softmaxes of all kernels share.
#pragma once

#include <cmath>

namespace minference::cuda {

inline constexpr float kInfinity = INFINITY;
inline constexpr float kLog2E = 1.4426950408889634F;
// The sums are rescaled only when a row's maximum has grown by more than this power of 2: until then
// weights stay below 2^8, which no type overflows.
inline constexpr float kRescaleThreshold = 8.0F;

}  // namespace minference::cuda

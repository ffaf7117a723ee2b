// What the lanes of a warp find out together by counting: scans over the lanes, and the lane or the bit that a
// place in such a scan belongs to.
#pragma once

#include <cstdint>

namespace minference::cuda {

// The sum of the values of this lane and of those before it.
template <class T>
__device__ inline T sum_to_lane(T value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0U, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The least of the values of this lane and of those before it.
__device__ inline int least_to_lane(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    value = min(value, __shfl_up_sync(~0U, value, distance));
  }
  return value;
}

// The first lane whose value, which grows with the lanes, is above a place; 31 where none is.
__device__ inline int lane_above(int values, int place) {
  int lane = 0;
  for (int step = 16; step > 0; step /= 2) {
    if (__shfl_sync(~0U, values, lane + step - 1) <= place) lane += step;
  }
  return lane;
}

// Of the set bits of a word that above which `above` others are set.
__device__ inline int bit_below(std::uint32_t word, int above) {
  int place = 0;
  for (int step = 16; step > 0; step /= 2) {
    if (__popc(word >> (place + step)) > above) place += step;
  }
  return place;
}

}  // namespace minference::cuda

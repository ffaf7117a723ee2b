// Densities: how much mass the boxes of a distance hold for what they cost, in steps.
#pragma once

#include <cstdint>

#include "index/cuda/coverings.h"

namespace minference::cuda {

// The row block's own box and two before it, which every covering has: what the CPU's rule has in
// granules, rounded up to boxes.
inline constexpr int kLocalBoxes = 3;

// Distances of one head whose columns begin with a class.
class Densities {
 public:
  // `by_distance` of the head.
  __device__ Densities(const Geometry& geometry, const std::uint32_t* by_distance,
                       std::int64_t stride, int least_class)
      : by_distance_(by_distance), stride_(stride), least_class_(least_class) {
    q_len_ = geometry.q_len;
    first_ = geometry.position(0) + box_shift(geometry);
    count_ = (first_ + q_len_ - 1) / kBoxKeys + 1;
  }

  __device__ int count() const { return count_; }

  // Mass, in one half of the rows, of what is no column.
  __device__ std::uint32_t mass(int half, int distance) const {
    std::uint32_t sum = 0;
    for (int c = 0; c < least_class_; ++c) {
      sum += by_distance_[(half * kMassClasses + c) * stride_ + distance];
    }
    return sum;
  }

  // Rows that have the distance.
  __device__ int rows(int distance) const {
    return q_len_ - min(max(distance * kBoxKeys - first_, 0), q_len_ - 1);
  }

  // The step of so much mass, of all rows, at a distance; 0 where there is none.
  __device__ int step(int distance, std::uint32_t units) const {
    if (distance < kLocalBoxes) return kDensitySteps - 1;
    if (units == 0) return 0;
    constexpr int kShift = 20;  // leaves a float's exponent and three bits more
    constexpr int kLowest = (127 - 32) << 3;
    const float density = static_cast<float>(units) / static_cast<float>(rows(distance));
    const int step = static_cast<int>(__float_as_uint(density) >> kShift) - kLowest;
    return min(max(step, 1), kDensitySteps - 2);
  }
  __device__ int step(int distance) const {
    return distance < 0 || distance >= count_
               ? 0
               : step(distance, mass(0, distance) + mass(1, distance));
  }

 private:
  const std::uint32_t* by_distance_;
  std::int64_t stride_;
  int least_class_;
  int q_len_ = 0;
  int first_ = 0;
  int count_ = 0;
};

}  // namespace minference::cuda

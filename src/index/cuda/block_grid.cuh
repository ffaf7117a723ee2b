// DeviceGrid: how the rows of a chunk and the keys of its sequence fall into blocks; index/block_grid.h
// on the device.
#pragma once

#include <cstdint>

#include "attention/cuda/problem.h"

namespace minference::cuda {

class DeviceGrid {
 public:
  // Key blocks [begin, end).
  struct Range {
    int begin = 0;
    int end = 0;

    __device__ bool contains(int n) const { return n >= begin && n < end; }
    __device__ int size() const { return end - begin; }
  };

  __device__ DeviceGrid(const Geometry& geometry, int size) : geometry_(geometry), size_(size) {}

  __device__ const Geometry& geometry() const { return geometry_; }
  __device__ int row_blocks() const { return (geometry_.q_len + size_ - 1) / size_; }
  __device__ int key_blocks() const { return (geometry_.kv_len + size_ - 1) / size_; }
  __device__ int first_row(int m) const { return m * size_; }
  __device__ int end_row(int m) const { return min((m + 1) * size_, geometry_.q_len); }

  // Key blocks that some of the rows [begin, end) may see; of the row block.
  __device__ Range visible_from(int begin, int end) const {
    const int last_key = geometry_.end_key(end - 1);
    const int first_key = geometry_.first_key(begin);
    if (first_key >= last_key) return {};
    return {first_key / size_, (last_key + size_ - 1) / size_};
  }
  __device__ Range visible(int m) const { return visible_from(first_row(m), end_row(m)); }

  // Key blocks that hold the positions of the row block itself.
  __device__ Range diagonal(int m) const {
    const int first = geometry_.position(first_row(m));
    const int last = geometry_.position(end_row(m) - 1);
    if (last < 0) return {};
    const Range seen = visible(m);
    const Range own{max(max(first, 0) / size_, seen.begin), min(last / size_ + 1, seen.end)};
    return own.begin < own.end ? own : Range{};
  }

 private:
  Geometry geometry_;
  int size_;
};

}  // namespace minference::cuda

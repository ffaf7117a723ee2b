// BoxRing: a tile's boxes in shared memory, made by one warp ahead of the block that works on them.
#pragma once

#include "attention/cuda/box_stream.cuh"

namespace minference::cuda {

// The boxes lie in batches: while one is worked on, the next is made. Behind the last box come some with
// kEndOfTile.
struct BoxRing {
  static constexpr int kBatch = 4;
  static constexpr int kBatches = 2;
  static constexpr int kBoxes = kBatches * kBatch;

  Box boxes[kBoxes];
  // What the stream has made beyond these, and the lanes that made it.
  Box ahead[32];
  std::uint32_t ahead_left;
  // Between batches the stream stays here: it would fill the registers of the warp that runs it.
  alignas(8) char stream[sizeof(BoxStream)];

  // The rest is for one whole warp; a barrier of the block must follow before the boxes are read.

  // Makes batch 0.
  __device__ void start(const Problem& problem, const DeviceIndex& index, const RowTile& tile) {
    BoxStream fresh;
    fresh.start(problem, index, tile);
    if (threadIdx.x % 32 == 0) ahead_left = 0;
    __syncwarp();
    make(fresh, 0);
    keep(fresh);
  }

  // Makes a later batch, after a barrier behind the last use of the one before the last.
  __device__ void make_batch(int batch) {
    BoxStream kept = *reinterpret_cast<BoxStream*>(stream);
    make(kept, batch % kBatches);
    keep(kept);
  }

 private:
  __device__ void make(BoxStream& from, int batch) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t left = ahead_left;
#pragma unroll 1
    for (int i = 0; i < kBatch; ++i) {
      if (left == 0) {
        Box box;
        left = from.next(box);
        __syncwarp();
        ahead[lane] = box;
        __syncwarp();
      }
      if (lane == 0) {
        Box& to = boxes[batch * kBatch + i];
        to = {};
        to.flags = Box::kEndOfTile;
        if (left != 0) to = ahead[__ffs(static_cast<int>(left)) - 1];
      }
      left &= left - 1;
    }
    __syncwarp();
    if (lane == 0) ahead_left = left;
  }

  __device__ void keep(const BoxStream& from) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) *reinterpret_cast<BoxStream*>(stream) = from;
    __syncwarp();
  }
};

}  // namespace minference::cuda

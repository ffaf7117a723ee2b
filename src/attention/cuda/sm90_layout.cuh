// How a thread block of the sm_90a executor lays out its shared memory, and what its warps count on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/box_stream.cuh"

namespace minference::cuda::sm90 {

// What a kernel is compiled for. Head dims rounded up to 64; boxes that are multiplied at a time; consumer
// warpgroups, of 64 rows each; kBlocks: for heads that are dense or have bits of blocks.
template <int kTheDim, int kTheVDim, int kTheBoxes, int kTheConsumers, bool kTheBlocks = false>
struct Shape {
  static constexpr int kDim = kTheDim;
  static constexpr int kVDim = kTheVDim;
  static constexpr int kBoxes = kTheBoxes;
  static constexpr int kConsumers = kTheConsumers;
  static constexpr bool kBlocks = kTheBlocks;
  static constexpr int kRows = kConsumers * kGroupRows;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of a multiprocessor's 512 for each of 128 threads: as few for the producer as let it spill little, the
  // rest for the consumers, whose sums grow with the head.
  static constexpr int kProducerRegisters =
      kConsumers == 3 ? 32 : (kDim * kBoxes <= 128 ? 104 : (kDim <= 192 && kBoxes == 1 ? 72 : 56));
  static constexpr int kConsumerRegisters = (512 - kProducerRegisters) / kConsumers / 8 * 8;
};
constexpr int kPieceColumns = 64;  // of 16 bits: the 128 bytes that the swizzle permutes
constexpr int kPieceBytes = kBoxKeys * kPieceColumns * 2;  // of one box or one group of rows
constexpr int kSharedLimit = 227 * 1024;

// Layout of shared memory. A stage holds kBoxes boxes, piece by piece of 64 columns: those of both boxes
// lie together, so that a product may span them.
template <class S>
struct Shared {
  static constexpr int kDim = S::kDim;
  static constexpr int kVDim = S::kVDim;
  static constexpr int kBoxes = S::kBoxes;
  static constexpr int kQBytes = S::kRows * kDim * 2;
  static constexpr int kKeyBytes = kBoxes * kBoxKeys * kDim * 2;
  static constexpr int kValueBytes = kBoxes * kBoxKeys * kVDim * 2;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kStages = std::min(8, (kSharedLimit - 1024 - 1024 - kQBytes) / kStageBytes);
  static_assert(kStages >= 2);

  // Where the boxes of a stage come from.
  struct Origin {
    std::int32_t sequence;  // negative: there is no more work
    std::int32_t kv_head;
    std::int32_t first_column;
  };
  struct Control {
    std::uint64_t empty[kStages];
    std::uint64_t described[kStages];  // what it is for is known
    std::uint64_t full[kStages];
    std::uint64_t q_full;
    std::uint64_t q_empty;
    RowTile tile;  // row_end 0: there is no more work
    Origin origins[kStages];
    BoxOf<S::kConsumers> boxes[kStages][kBoxes];
  };
  static_assert(sizeof(Control) <= 1024);
  // The swizzle's pattern repeats every 1,024 bytes: pieces begin at multiples of it.
  static constexpr int kBytes = 1024 + sizeof(Control) + kQBytes + kStages * kStageBytes;
};

// Where a pipeline stands: the stage and how often it has been gone through.
template <int kStages>
struct Cursor {
  int stage = 0;
  std::uint32_t phase = 0;

  __device__ int after() const { return stage + 1 == kStages ? 0 : stage + 1; }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace minference::cuda::sm90

// ModalityWork: what the kernels of an index by modality get: one sequence, its heads in flight, and the
// memory in which they hand results on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "core/host_device.h"
#include "index/cuda/class_sums.h"
#include "index/cuda/top_k.cuh"
#include "minference/index_recipe.h"

namespace minference::cuda {

inline constexpr int kMostSamples = 3;
// The heaviest keys, or offsets, by one sample: those of text, of visual keys, or of all.
inline constexpr int kAllKeys = kKeyClasses;
inline constexpr int kSetsOfSample = kKeyClasses + 1;
inline constexpr int kMostSets = kMostSamples * kSetsOfSample;

// A visual segment with strides to try, as ModalitySequence::Grid.
struct GridCandidate {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t region_begin = 0;
  std::int32_t region_end = 0;
  std::int32_t first_stride = 0;
  std::int32_t last_stride = 0;
  std::int32_t list_begin = 0;  // of its heaviest columns
  std::int32_t list_count = 0;
};

// The best stride of some; stride 0: none.
struct GridFit {
  double excess = 0;
  std::int32_t stride = 0;
  std::int32_t phase = 0;  // from the segment's first token on
};

// What `auto` chooses a kind by: mass of the rows of text (group 0) or of the visual ones.
struct ModalityShares {
  static constexpr int kGroups = 2;

  double total = 0;
  double own = 0;       // on the group's own columns
  double together = 0;  // on those of the last rows
  double pairs = 0;     // on those by class of key
  double outside = 0;   // of the A-shape of a grid head, by the visual rows
  double on_lines = 0;  // of that
};

struct ModalityWork {
  // Of the sequence.
  Geometry geometry;
  ModalityRule::Kind kind = ModalityRule::Kind::kAuto;
  bool keeps_light = false;  // positions without mass as well
  std::int32_t vertical = 0;
  std::int32_t slash = 0;
  std::int32_t n_local = 1;
  std::int32_t initial_keys = 0;
  double grid_share = 0;
  double min_gain = 0;
  std::int32_t sampled_position = 0;               // of the first visual row that is sampled
  std::int32_t keys_of_sample[kMostSamples] = {};  // that its rows see
  // Samples, -1: there are no such rows.
  std::int32_t text = -1;
  std::int32_t visual = -1;
  std::int32_t last = -1;
  // Bits, by kind: sets that a head unites; of kGrid: one without lines; of kAuto: all that may be.
  std::uint32_t sets_of_kind[5] = {};
  std::int32_t candidate_count = 0;

  // Of the heads in flight.
  std::int32_t head_count = 0;
  std::int64_t stride = 0;  // floats
  std::int32_t words = 0;   // a bit a key or offset
  std::int32_t block_words = 0;
  std::int32_t list_room = 0;  // of all candidates
  std::int32_t row_blocks = 0;
  SelectParts parts;
  SelectRow rows;                         // [heads][sets to select]
  std::uint32_t* visual_keys = nullptr;   // [words]
  GridCandidate* candidates = nullptr;    // [candidate_count]
  ClassSums sums[kMostSamples];           // of each sample
  std::uint32_t* kept_columns = nullptr;  // [heads][kMostSets][words]
  std::uint32_t* kept_offsets = nullptr;  // the same
  std::uint32_t* sets = nullptr;          // [heads], bits: sets that the head unites; 0: a grid
  ModalityShares* shares = nullptr;       // [heads][kGroups][parts]
  std::int32_t* heavy_tokens = nullptr;   // [heads][list_room]
  unsigned long long* heavy_masses = nullptr;  // the same
  GridFit* fits = nullptr;                     // [heads][candidate_count][kFoldSlices]
  std::uint32_t* lines = nullptr;              // [heads][words], keys on lines
  std::uint32_t* everywhere = nullptr;         // [heads][block_words], key blocks of all rows
  int* found = nullptr;                        // [heads], whether there are lines
  int* leaves_out = nullptr;                   // [heads], whether some row block lacks a block
  std::int32_t* lists = nullptr;               // [heads][stride + kBoxKeys]

  // The result, of the first head in flight.
  DeviceHead* heads = nullptr;
  std::int64_t column_begin = 0;
  std::int64_t run_begin = 0;
  std::int64_t bits_begin = 0;
  std::int32_t columns_of_head = 0;
  std::int32_t runs_of_head = 0;
  std::int32_t* columns = nullptr;
  DeviceRun* runs = nullptr;
  std::uint32_t* bits = nullptr;

  // Fills sets_of_kind from the samples.
  void find_sets() {
    using Kind = ModalityRule::Kind;
    const auto bit = [](int sample, int of_class) {
      return sample < 0 ? 0 : 1U << (sample * kSetsOfSample + of_class);
    };
    const auto set = [&](Kind of_kind) -> std::uint32_t& {
      return sets_of_kind[static_cast<int>(of_kind)];
    };
    set(Kind::kGrid) = bit(visual, kAllKeys);
    set(Kind::kQBoundary) = bit(text, kAllKeys) | bit(visual, kAllKeys);
    set(Kind::k2DBoundary) = bit(text, 0) | bit(text, 1) | bit(visual, 0) | bit(visual, 1);
    set(Kind::kVerticalSlash) = bit(last, kAllKeys);
    set(Kind::kAuto) = set(Kind::kQBoundary) | set(Kind::k2DBoundary) | set(Kind::kVerticalSlash);
  }
  MINFERENCE_HOST_DEVICE std::uint32_t sets_of(ModalityRule::Kind of_kind) const {
    return sets_of_kind[static_cast<int>(of_kind)];
  }
  MINFERENCE_HOST_DEVICE bool may_be_grid() const {
    return candidate_count > 0 &&
           (kind == ModalityRule::Kind::kAuto || kind == ModalityRule::Kind::kGrid);
  }
  MINFERENCE_HOST_DEVICE std::int64_t bits_of_head() const {
    return static_cast<std::int64_t>(row_blocks) * block_words;
  }

#ifdef __CUDACC__
  __device__ static bool has_bit(const std::uint32_t* bits_of, int i) {
    return (bits_of[i / 32] >> (i % 32) & 1) != 0;
  }
  __device__ const float* columns_of(int sample, int head) const {
    return sums[sample].columns + head * stride;
  }
  __device__ std::uint32_t* set_of(std::uint32_t* kept, int head, int set) const {
    return kept + (static_cast<std::int64_t>(head) * kMostSets + set) * words;
  }
  __device__ std::uint32_t* lines_of(int head) const {
    return lines + static_cast<std::int64_t>(head) * words;
  }
  __device__ std::uint32_t* everywhere_of(int head) const {
    return everywhere + static_cast<std::int64_t>(head) * block_words;
  }
#endif
};

inline constexpr int kFoldSlices = 16;  // thread blocks for the strides of a candidate

// Enqueue, for the heads in flight and in this order: the lines of grids; the columns of all sets; what
// each head unites; the offsets of those sets; which blocks heads that are grids keep. What they write
// in bits and `found` is 0 before.
void find_lines(const ModalityWork& work, cudaStream_t stream);
// Rows of the selection that it takes a head.
std::int64_t grid_selection_rows(std::int64_t candidates);
void select_columns(const ModalityWork& work, cudaStream_t stream);
void choose_sets(const ModalityWork& work, cudaStream_t stream);
void select_offsets(const ModalityWork& work, cudaStream_t stream);
void keep_grid_blocks(const ModalityWork& work, cudaStream_t stream);

}  // namespace minference::cuda

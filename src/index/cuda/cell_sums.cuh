// What becomes of a tile of cells: its products on tensor cores, and their sums.
#pragma once

#include <cstdint>

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"
#include "index/cuda/cell_scores.h"
#include "index/cuda/cell_tiles.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::cells {

// One of the two warpgroups that multiply. Of a tile's scores, the lane holds those of rows
// 16 * warp + lane / 4 + 8 * i and cells 8 * j + 2 * (lane % 4) + e, at 4 * j + 2 * i + e.
template <class T, int kColumns, int kCluster>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Control& control, std::uint32_t stages)
      : a_(a),
        control_(control),
        stages_(stages),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_(group_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane_ / 4),
        // A factor that is not positive would turn maxima around, and the soft cap is no factor: then
        // scores are scaled first.
        plain_(a.plan.scale > 0 && !(a.problem.soft_cap > 0)),
        factor_(plain_ ? a.plan.scale * kLog2E : 1.0F) {}

  __device__ __forceinline__ void run() {
    const int steps = a_.plan.stride * a_.panels;
    for (;;) {
      wait_for_phase(shared_address(&control_.full[at_.stage]), at_.parity);
      const CellTile tile = control_.tiles[at_.stage];
      if (tile.head < 0) return;
      multiply(steps);
      sum_up(tile);
    }
  }

 private:
  static constexpr int kScoreCount = kColumns / 2;
  static constexpr int kStageBytes = (CellScores::kTileRows + kColumns) * kRowBytes;
  static constexpr int kSplitSlot = CellScores::kSplitSlot;

  // In all blocks of the cluster, each of which fetches keys for this one.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    const std::uint32_t empty = shared_address(&control_.empty[stage]);
    if constexpr (kCluster == 1) {
      if (lane_ == 0) arrive_at(empty);
    } else {
      if (lane_ < kCluster) mbarrier_arrive_at(empty, lane_);
    }
  }

  __device__ __forceinline__ void multiply(int steps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    int last = -1;
    pin(scores_);
    for (int step = 0; step < steps; ++step) {
      wait_for_phase(shared_address(&control_.full[at_.stage]), at_.parity);
      const std::uint32_t tile = stages_ + at_.stage * kStageBytes;
      const MatrixDescriptor rows(tile + group_ * 64 * kRowBytes, 16, 1024);
      const MatrixDescriptor keys(tile + CellScores::kTileRows * kRowBytes, 16, 1024);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kPanelDims / 16; ++s) {
        wgmma_ss<T, false>(scores_, rows.at(32 * s), keys.at(32 * s), step + s > 0);
      }
      wgmma_commit();
      if (last >= 0) {
        wgmma_wait<1>();
        release(last);
      }
      last = at_.stage;
      at_.advance(a_.stages);
    }
    wgmma_wait<0>();
    pin(scores_);
    release(last);
#else
#pragma unroll
    for (float& score : scores_) score = 0.0F;
    for (int step = 0; step < steps; ++step) {
      wait_for_phase(shared_address(&control_.full[at_.stage]), at_.parity);
      const std::uint32_t tile = stages_ + at_.stage * kStageBytes;
      const std::uint32_t keys = tile + CellScores::kTileRows * kRowBytes;
      const int row = group_ * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane_ % 16;
#pragma unroll
      for (int s = 0; s < kPanelDims / 16; ++s) {
        std::uint32_t of_rows[4];
        ldmatrix_x4(of_rows, tile + chunk_offset(row, 2 * s + lane_ / 16));
#pragma unroll
        for (int j = 0; j < kColumns / 8; j += 2) {
          std::uint32_t of_keys[4];
          const int key = 8 * j + lane_ / 16 * 8 + lane_ % 8;
          ldmatrix_x4(of_keys, keys + chunk_offset(key, 2 * s + lane_ / 8 % 2));
          mma_16816<T>(four(j), of_rows, of_keys[0], of_keys[1]);
          mma_16816<T>(four(j + 1), of_rows, of_keys[2], of_keys[3]);
        }
      }
      release(at_.stage);
      at_.advance(a_.stages);
    }
#endif
  }

  __device__ __forceinline__ float (&four(int j))[4] {
    return *reinterpret_cast<float(*)[4]>(scores_ + 4 * j);
  }

  __device__ __forceinline__ void sum_up(const CellTile& tile) {
    if (!plain_) scale();
    const Geometry geometry =
        sequence_geometry(a_.problem, (a_.first_head + tile.head) / a_.problem.q_heads);
    const int first_row =
        first_cell(a_.plan, geometry, a_.first_row) + tile.row * CellScores::kTileRows;
    const int first_key = tile.column * kColumns;
    const int stride = a_.plan.stride;
    // Behind the last rows, of which another block of the cluster has some, there is no room for sums.
    if (tile.row * CellScores::kTileRows >= a_.rows) return;
    const CellRange first(geometry, stride, first_row, first_row);
    const int last_row = first_row + CellScores::kTileRows - 1;
    const CellRange last(geometry, stride, last_row, last_row);
    const bool all = last.begin <= first_key && first.end >= first_key + kColumns;
    sum_up_row<0>(tile, geometry, first_row, all);
    sum_up_row<1>(tile, geometry, first_row, all);
  }

  template <int kHalf>
  __device__ __forceinline__ void sum_up_row(const CellTile& tile, const Geometry& geometry,
                                             int first_row, bool all) {
    const int row = first_row + row_ + 8 * kHalf;
    const int first_key = tile.column * kColumns;
    if (!all) {
      const CellRange seen(geometry, a_.plan.stride, row, row);
      const int first = first_key + lane_ % 4 * 2;
      hide<kHalf>(seen.begin - first, seen.end - first);
    }
    const float shift = exponentials<kHalf>();
    float* to = a_.plan.sums + (static_cast<std::int64_t>(tile.head) * a_.plan.rows +
                                tile.row * CellScores::kTileRows + row_ + 8 * kHalf) *
                                   a_.plan.row_sums();
    if (a_.plan.split != 0) {
      const int place = max(geometry.position(row), 0) % a_.plan.split;
      write_split<kHalf>(shift, place, first_key,
                         reinterpret_cast<float2*>(to) + first_key / kSplitSlot);
      return;
    }
    to += first_key / a_.plan.slot;
    if (a_.plan.slot == 16) {
      write_slots<kHalf, 2>(shift, to);
    } else if (a_.plan.slot == 8) {
      write_slots<kHalf, 1>(shift, to);
    } else {
      write_small_slots<kHalf>(shift, to);
    }
  }

  // To units of log2(e).
  __device__ __forceinline__ void scale() {
    const float scale = a_.plan.scale;
    const float cap = a_.problem.soft_cap;
    if (cap > 0) {
#pragma unroll
      for (float& score : scores_) score = cap * kLog2E * tanhf(score * scale / cap);
    } else {
      const float factor = scale * kLog2E;
#pragma unroll
      for (float& score : scores_) score *= factor;
    }
  }

  // Leaves cells [begin, end) of a half's row, counted from the lane's first.
  template <int kHalf>
  __device__ __forceinline__ void hide(int begin, int end) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int cell = 8 * j + e;
        if (cell < begin || cell >= end) scores_[4 * j + 2 * kHalf + e] = -kInfinity;
      }
    }
  }

  // Turns the row's scores into exponentials relative to their maximum, whose logarithm is returned.
  template <int kHalf>
  __device__ __forceinline__ float exponentials() {
    float highest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      highest[0] = fmaxf(highest[0], scores_[4 * j + 2 * kHalf]);
      highest[1] = fmaxf(highest[1], scores_[4 * j + 2 * kHalf + 1]);
    }
    float shift = fmaxf(highest[0], highest[1]);
    shift = fmaxf(shift, __shfl_xor_sync(~0U, shift, 1));
    shift = fmaxf(shift, __shfl_xor_sync(~0U, shift, 2));
    shift = shift == -kInfinity ? 0.0F : shift * factor_;  // the row sees nothing here
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores_[4 * j + 2 * kHalf + e];
        score = exp2_fast(fmaf(score, factor_, -shift));
      }
    }
    return shift;
  }

  // Of four sums that the lanes of a quad have a part of each, one: the one of the lane's place.
  __device__ __forceinline__ float one_of_quad(const float (&sums)[4]) const {
    const bool odd = (lane_ & 1) != 0;
    const bool high = (lane_ & 2) != 0;
    float low = odd ? sums[1] : sums[0];
    low += __shfl_xor_sync(~0U, odd ? sums[0] : sums[1], 1);
    float upper = odd ? sums[3] : sums[2];
    upper += __shfl_xor_sync(~0U, odd ? sums[2] : sums[3], 1);
    return (high ? upper : low) + __shfl_xor_sync(~0U, high ? low : upper, 2);
  }

  // Slots of kSplitSlot keys, each in two parts. `place` of the row's position in its block.
  template <int kHalf>
  __device__ __forceinline__ void write_split(float shift, int place, int first_key,
                                              float2* to) const {
    constexpr int kOctets = kSplitSlot / 8;
    int slot_place = first_key % a_.plan.split;
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += kOctets) {
      float far = 0.0F;
      float near = 0.0F;
      const int last = place - slot_place - lane_ % 4 * 2;  // that is far, from the lane's first
#pragma unroll
      for (int k = 0; k < 2 * kOctets; ++k) {
        const float value = scores_[4 * (first + k / 2) + 2 * kHalf + k % 2];
        const bool is_far = k / 2 * 8 + k % 2 <= last;
        far += is_far ? value : 0.0F;
        near += is_far ? 0.0F : value;
      }
      far += __shfl_xor_sync(~0U, far, 1);
      near += __shfl_xor_sync(~0U, near, 1);
      far += __shfl_xor_sync(~0U, far, 2);
      near += __shfl_xor_sync(~0U, near, 2);
      if (lane_ % 4 == 0) to[first / kOctets] = {shift + __log2f(far), shift + __log2f(near)};
      slot_place += kSplitSlot;
      if (slot_place == a_.plan.split) slot_place = 0;
    }
  }

  // Slots of kOctets * 8 cells.
  template <int kHalf, int kOctets>
  __device__ __forceinline__ void write_slots(float shift, float* to) const {
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += 4 * kOctets) {
      float sums[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        sums[s] = 0.0F;
#pragma unroll
        for (int j = first + s * kOctets; j < first + (s + 1) * kOctets; ++j) {
          sums[s] += scores_[4 * j + 2 * kHalf] + scores_[4 * j + 2 * kHalf + 1];
        }
      }
      to[first / kOctets + lane_ % 4] = shift + __log2f(one_of_quad(sums));
    }
  }

  // Slots of 4, 2 or 1 cells.
  template <int kHalf>
  __device__ __forceinline__ void write_small_slots(float shift, float* to) const {
    const int slot = a_.plan.slot;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float first = scores_[4 * j + 2 * kHalf];
      const float second = scores_[4 * j + 2 * kHalf + 1];
      const float both = first + second;
      const float four = both + __shfl_xor_sync(~0U, both, 1);
      const int cell = 8 * j + lane_ % 4 * 2;
      if (slot == 1) {
        to[cell] = shift + __log2f(first);
        to[cell + 1] = shift + __log2f(second);
      } else if (slot == 2 || (lane_ & 1) == 0) {
        to[cell / slot] = shift + __log2f(slot == 2 ? both : four);
      }
    }
  }

  const Arguments& a_;
  Control& control_;
  std::uint32_t stages_;
  int group_;
  int lane_;
  int row_;  // of i = 0, in the tile
  bool plain_;
  float factor_;  // that is still missing from the scores
  Cursor at_;
  float scores_[kScoreCount];
};

}  // namespace minference::cuda::cells

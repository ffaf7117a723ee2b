// The consumer of the sm_90a executor: one warpgroup that attends to 64 rows of a tile.
#pragma once

#include <cstdint>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/elements.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/row_bits.cuh"
#include "attention/cuda/sm90_layout.cuh"
#include "attention/cuda/softmax.cuh"

namespace minference::cuda::sm90 {

template <class T, class S>
class Consumer {
  using Layout = Shared<S>;
  using Box = BoxOf<S::kConsumers>;
  static constexpr int kDim = S::kDim;
  static constexpr int kVDim = S::kVDim;
  static constexpr int kBoxes = S::kBoxes;
  static constexpr int kStages = Layout::kStages;
  static constexpr int kKeys = kBoxes * kBoxKeys;
  // Where they fit, queries stay in registers: the product with 64 keys then reads these alone from
  // shared memory, whose bandwidth it would exceed otherwise.
  static constexpr bool kQInRegisters = kDim * kBoxes <= (S::kConsumers == 3 ? 64 : 128);
  static constexpr int kQSteps = kDim / 16;
  static constexpr int kScores = kKeys / 2;  // registers of an accumulator of 64 rows
  static constexpr int kOutputs = kVDim / 2;

 public:
  __device__ __forceinline__ Consumer(const Problem& problem, const DeviceIndex& index,
                                      typename Layout::Control& control, std::uint32_t q,
                                      char* stages, int group)
      : problem_(problem),
        index_(index),
        control_(control),
        q_(q + group * kGroupRows * kDim * 2),
        stage_memory_(stages),
        stages_(shared_address(stages)),
        group_(group),
        thread_(static_cast<int>(threadIdx.x) % 128),
        // The scores are scaled in f32. A factor that is not positive would turn maxima around, and
        // the soft cap is no factor: then logits are computed first.
        plain_(problem.scale > 0 && problem.soft_cap == 0),
        factor_(plain_ ? problem.scale * kLog2E : 1.0F),
        cap_exponent_(problem.soft_cap > 0 ? soft_cap_exponent(problem.soft_cap, 1.0F) : 0.0F) {}

  __device__ __forceinline__ void run(int* not_finite) {
    std::uint32_t q_phase = 0;
    for (;;) {
      mbarrier_wait(shared_address(&control_.q_full), q_phase);
      q_phase ^= 1;
      tile_ = control_.tile;
      if (tile_.row_end == 0) break;
      if constexpr (kQInRegisters) {
        load_queries();
        release(&control_.q_empty);
      }
      attend();
      if constexpr (!kQInRegisters) release(&control_.q_empty);
      if (!write_rows()) *not_finite = 1;
    }
    if (problem_.kept_pairs != nullptr) atomicAdd(problem_.kept_pairs, kept_);
  }

 private:
  __device__ __forceinline__ int warp() const { return thread_ / 32; }
  __device__ __forceinline__ int lane() const { return thread_ % 32; }
  // The thread holds rows row(0) and row(1) of every accumulator, and of each 8 columns two.
  __device__ __forceinline__ int row(int half) const {
    return tile_.base + group_ * kGroupRows + warp() * 16 + lane() / 4 + half * 8;
  }

  __device__ __forceinline__ void release(std::uint64_t* barrier) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared_address(barrier));
  }

  __device__ __forceinline__ void load_queries() {
    const int r = warp() * 16 + lane() % 16;
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const int chunk = step % 4 * 2 + lane() / 16;
      ldmatrix_x4(queries_[step], q_ + step / 4 * kPieceBytes + r * 128 + ((chunk ^ (r % 8)) * 16));
    }
  }

  // Takes the boxes until one that this group uses; false at the end of the tile.
  __device__ __forceinline__ bool next_box() {
    for (;;) {
      mbarrier_wait(shared_address(&control_.full[at_.stage]), at_.phase);
      flags_ = control_.boxes[at_.stage][0].flags;
      if constexpr (kBoxes == 2) {
        if ((flags_ & Box::kEndOfTile) == 0) flags_ |= control_.boxes[at_.stage][1].flags;
      }
      if ((flags_ & (Box::kUse << group_)) != 0) return true;
      if ((flags_ & Box::kEndOfTile) == 0 && at_.after() == pending_stage_) {
        // That stage is not free before the next box has been multiplied, and the producer cannot go
        // on without it: multiply this one, all masked.
        return true;
      }
      release(&control_.empty[at_.stage]);
      at_.advance();
      if ((flags_ & Box::kEndOfTile) != 0) return false;
    }
  }

  __device__ __forceinline__ void issue_scores() {
    const MatrixDescriptor keys(stages_ + at_.stage * Layout::kStageBytes, 16, 1024);
    const MatrixDescriptor queries(q_, 16, 1024);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const std::uint64_t b = keys.at(step / 4 * kBoxes * kPieceBytes + step % 4 * 32);
      if constexpr (kQInRegisters) {
        wgmma_rs<T, false>(scores_, queries_[step], b, step > 0);
      } else {
        wgmma_ss<T, false>(scores_, queries.at(step / 4 * kPieceBytes + step % 4 * 32), b,
                           step > 0);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(int stage) {
    const MatrixDescriptor values(stages_ + stage * Layout::kStageBytes + Layout::kKeyBytes,
                                  kBoxes * kPieceBytes, 1024);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_rs<T, true>(outputs_, weights_[step], values.at(step * 16 * 128), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (float& output : outputs_) output = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum_[half] = -kInfinity;
      sum_[half] = 0;
    }
    pending_stage_ = -1;
    if (!next_box()) return;
    if ((flags_ & Box::kPastEnd) != 0) clear_values_past_end();
    pin(scores_);
    wgmma_fence();
    issue_scores();
    wgmma_wait<0>();
    pin(scores_);
    softmax();
    make_weights();
    while (next_box()) {
      if ((flags_ & Box::kPastEnd) != 0) clear_values_past_end();
      pin(scores_);
      pin(outputs_);
      wgmma_fence();
      issue_scores();
      issue_values(pending_stage_);
      wgmma_wait<1>();
      pin(scores_);
      softmax();
      // All of the softmax comes before the wait: it is what hides the product with the values.
      pin(scores_);
      wgmma_wait<0>();
      pin(outputs_);
      release(&control_.empty[pending_stage_]);
      rescale();
      make_weights();
    }
    pin(outputs_);
    wgmma_fence();
    issue_values(pending_stage_);
    wgmma_wait<0>();
    pin(outputs_);
    release(&control_.empty[pending_stage_]);
  }

  // Rounds the weights for the product with the values; their box stays until that is done.
  __device__ __forceinline__ void make_weights() {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights_[step][i] = pack_pair<T>(scores_[step * 8 + i * 2], scores_[step * 8 + i * 2 + 1]);
      }
    }
    pending_stage_ = at_.stage;
    at_.advance();
  }

  // Memory past the keys may hold anything, and 0 * NaN is no 0. Both groups write the same zeros.
  __device__ __forceinline__ void clear_values_past_end() {
    const int kv_len = sequence_geometry(problem_, tile_.b).kv_len;
    char* values = stage_memory_ + at_.stage * Layout::kStageBytes + Layout::kKeyBytes;
    for (int place = 0; place < kBoxes; ++place) {
      const Box& box = control_.boxes[at_.stage][place];
      if ((box.flags & Box::kPastEnd) == 0) continue;
      const int begin = max(kv_len - box.start, 0);
      const int count = (kBoxKeys - begin) * 8;  // 16-byte chunks of a piece
      for (int i = thread_; i < count * (kVDim / kPieceColumns); i += 128) {
        char* piece = values + (i / count * kBoxes + place) * kPieceBytes;
        *reinterpret_cast<uint4*>(piece + begin * 128 + i % count * 16) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
    named_barrier(1 + group_, 128);
  }

  // Turns scores into weights relative to maximum_, which it raises where it has to; growth_ says by
  // how much the sums so far must shrink.
  __device__ __forceinline__ void softmax() {
    if (!plain_) {
#pragma unroll
      for (float& score : scores_) {
        score *= problem_.scale;
        if (problem_.soft_cap > 0) score = soft_capped(score, problem_.soft_cap, cap_exponent_);
        score *= kLog2E;
      }
    }
    if ((flags_ & (Box::kMasked << group_)) != 0) {
      mask();
    } else if (problem_.kept_pairs != nullptr && lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (asked_for(row(half))) kept_ += kKeys;
      }
    }
    // Chains of dependent operations are kept short: a scheduler has only two warps to choose from.
    constexpr int kChains = 4;
    float partial[2][kChains];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      float& chain = partial[i / 2 % 2][(i / 4 * 2 + i % 2) % kChains];
      chain = i < 4 * kChains / 2 ? scores_[i] : fmaxf(chain, scores_[i]);
    }
    float largest[2];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(fmaxf(partial[half][0], partial[half][1]),
                            fmaxf(partial[half][2], partial[half][3]));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0U, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0U, largest[half], 2)) * factor_;
      grown = grown || largest[half] > maximum_[half] + kRescaleThreshold;
    }
    grown_ = __any_sync(~0U, grown);
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (grown_) {
        const float raised = fmaxf(maximum_[half], largest[half]);
        // Rows that have seen nothing keep -inf, and a difference of infinities is none.
        growth_[half] = raised == -kInfinity ? 1.0F : exp2_fast(maximum_[half] - raised);
        maximum_[half] = raised;
        sum_[half] *= growth_[half];
      }
      shift[half] = maximum_[half] == -kInfinity ? 0.0F : maximum_[half];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores_[i] = exp2_fast(fmaf(scores_[i], factor_, -shift[i / 2 % 2]));
      float& chain = partial[i / 2 % 2][(i / 4 * 2 + i % 2) % kChains];
      chain = i < 4 * kChains / 2 ? scores_[i] : chain + scores_[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += (partial[half][0] + partial[half][1]) + (partial[half][2] + partial[half][3]);
    }
    pin(sum_);
  }

  __device__ __forceinline__ void rescale() {
    if (!grown_) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) outputs_[i] *= growth_[i / 2 % 2];
  }

  __device__ __forceinline__ bool asked_for(int r) const {
    return r >= tile_.row_begin && r < tile_.row_end && r < problem_.q_tokens;
  }

  __device__ __forceinline__ void mask() {
    const Geometry geometry = sequence_geometry(problem_, tile_.b);
#pragma unroll
    for (int place = 0; place < kBoxes; ++place) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint64_t visible = visible_bits(
            problem_, index_, geometry, tile_, control_.boxes[at_.stage][place], group_, row(half));
        if (lane() % 4 == 0 && asked_for(row(half))) kept_ += __popcll(visible);
        const std::uint64_t mine = visible >> (lane() % 4 * 2);
#pragma unroll
        for (int i = 0; i < kBoxKeys / 8; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if ((mine >> (i * 8 + c) & 1) == 0) {
              scores_[(place * 8 + i) * 4 + half * 2 + c] = -kInfinity;
            }
          }
        }
      }
    }
  }

  // False where an output is not finite.
  __device__ __forceinline__ bool write_rows() {
    float nothing = 0;  // but NaN once a value that is not finite has been multiplied in
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowSum total;
      total.shift = maximum_[half];
      total.sum = sum_[half];
      total.sum += __shfl_xor_sync(~0U, total.sum, 1);
      total.sum += __shfl_xor_sync(~0U, total.sum, 2);
      const float weight = total.close(problem_.sinks, tile_.h);
      const int r = row(half);
      if (!asked_for(r)) continue;
      if (lane() % 4 == 0) store_lse(problem_, tile_.b, r, tile_.h, total.lse());
      char* const out = tensor_row(problem_.out, tile_.b, r, tile_.h);
#pragma unroll
      for (int i = 0; i < kVDim / 8; ++i) {
        const int column = i * 8 + lane() % 4 * 2;
        const float a = outputs_[i * 4 + half * 2] * weight;
        const float b = outputs_[i * 4 + half * 2 + 1] * weight;
        nothing = fmaf(a, 0.0F, fmaf(b, 0.0F, nothing));
        store_pair(out, problem_.out.dtype, column, problem_.v_dim - column, a, b);
      }
    }
    return nothing == 0;
  }

  const Problem& problem_;
  const DeviceIndex& index_;
  typename Layout::Control& control_;
  std::uint32_t q_;
  char* stage_memory_;
  std::uint32_t stages_;
  int group_;
  int thread_;
  bool plain_;
  float factor_;
  float cap_exponent_;
  RowTile tile_;
  std::uint32_t flags_ = 0;  // of the current box
  Cursor<kStages> at_;
  int pending_stage_ = -1;  // of the box whose weights are in weights_
  std::uint32_t queries_[kQInRegisters ? kQSteps : 1][4];
  float scores_[kScores];
  std::uint32_t weights_[kKeys / 16][4];
  float outputs_[kOutputs];
  float maximum_[2];
  float sum_[2];
  float growth_[2];
  bool grown_ = false;
  unsigned long long kept_ = 0;
};

}  // namespace minference::cuda::sm90

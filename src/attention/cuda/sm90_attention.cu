// One producer warp walks the boxes of a tile and lets the copy engine fetch their keys and values;
// two consumer warpgroups of 64 rows each multiply, mask and sum. A consumer issues the product of
// the next box's scores before it takes the softmax of this one, so that the tensor cores work
// meanwhile; thread blocks are persistent and draw their tiles from a ticket.
#include "attention/cuda/sm90_attention.h"

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/check.h"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/tile_order.cuh"
#include "minference/error.h"

namespace minference::cuda {
namespace {

constexpr int kConsumers = kGroups;
constexpr int kThreads = 128 * (kConsumers + 1);
// Of a multiprocessor's 512 for each of 128 threads. The producer's stay in registers with 72; large
// heads need more for their sums.
template <int kDim, int kBoxes>
constexpr int kProducerRegisters = kDim * kBoxes <= 128 ? 72 : 40;
template <int kDim, int kBoxes>
constexpr int kConsumerRegisters = kDim * kBoxes <= 128 ? 216 : 232;
constexpr int kPieceColumns = 64;  // of 16 bits: the 128 bytes that the swizzle permutes
constexpr int kPieceBytes = kBoxKeys * kPieceColumns * 2;  // of one box or one group of rows
constexpr int kSharedLimit = 227 * 1024;
constexpr float kInfinity = INFINITY;
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
// The sums are rescaled only when a row's maximum has grown by more than this factor of 2: until then
// weights stay below 2^8, which no type overflows.
constexpr float kRescaleThreshold = 8.0F;

// Tensor maps of one launch.
struct Maps {
  CUtensorMap q, k, v, column_keys, column_values;
};

// Layout of shared memory. kDim and kVDim are head dims rounded up to 64; a stage holds kBoxes boxes,
// piece by piece of 64 columns: those of both boxes lie together, so that a product may span them.
template <int kDim, int kVDim, int kBoxes>
struct Shared {
  static constexpr int kQBytes = kTileRows * kDim * 2;
  static constexpr int kKeyBytes = kBoxes * kBoxKeys * kDim * 2;
  static constexpr int kValueBytes = kBoxes * kBoxKeys * kVDim * 2;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kStages =
      std::min(8, (kSharedLimit - 1024 - 1024 - kQBytes) / kStageBytes);
  static_assert(kStages >= 2);

  struct Control {
    std::uint64_t full[kStages];
    std::uint64_t empty[kStages];
    std::uint64_t q_full;
    std::uint64_t q_empty;
    RowTile tile;  // row_end 0: there is no more work
    Box boxes[kStages][kBoxes];
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

template <int kDim, int kVDim, int kBoxes>
class Producer {
  using Layout = Shared<kDim, kVDim, kBoxes>;

 public:
  __device__ Producer(const Problem& problem, const DeviceIndex& index, const Maps& maps,
                      typename Layout::Control& control, std::uint32_t q, std::uint32_t stages)
      : problem_(problem), index_(index), maps_(maps), control_(control), q_(q), stages_(stages) {}

  __device__ void run(int* ticket) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const TileOrder order(problem_);
    std::uint32_t q_phase = 0;
    for (;;) {
      int turn = 0;
      if (lane == 0) turn = atomicAdd(ticket, 1);
      turn = __shfl_sync(~0U, turn, 0);
      RowTile tile;
      const bool more = turn < order.count();
      if (more && !order.tile(index_, turn, tile)) continue;
      mbarrier_wait(shared_address(&control_.q_empty), q_phase ^ 1);
      q_phase ^= 1;
      if (lane == 0) {
        control_.tile = tile;
        if (more) {
          load_queries(tile);
        } else {
          mbarrier_arrive(shared_address(&control_.q_full));
        }
      }
      if (!more) return;
      BoxStream stream;
      stream.start(problem_, index_, tile);
      const int kv_head = tile.h / problem_.group;
      std::int64_t first_column = 0;
      if (index_.heads != nullptr) {
        first_column = index_.heads[tile.b * problem_.q_heads + tile.h].column_begin;
      }
      Box box;
      while (stream.next(box)) {
        mbarrier_wait(shared_address(&control_.empty[at_.stage]), at_.phase ^ 1);
        if (lane == 0) {
          mbarrier_arrive_expect(shared_address(&control_.full[at_.stage]), Layout::kStageBytes);
          load_box(box, 0, tile.b, kv_head, static_cast<int>(first_column));
        }
        if constexpr (kBoxes == 2) {
          Box second;
          if (!stream.next(second)) second = box.unseen();
          if (lane == 0) load_box(second, 1, tile.b, kv_head, static_cast<int>(first_column));
        }
        at_.advance();
      }
      mbarrier_wait(shared_address(&control_.empty[at_.stage]), at_.phase ^ 1);
      if (lane == 0) {
        control_.boxes[at_.stage][0].flags = Box::kEndOfTile;
        mbarrier_arrive(shared_address(&control_.full[at_.stage]));
      }
      at_.advance();
    }
  }

 private:
  __device__ void load_queries(const RowTile& tile) {
    const std::uint32_t barrier = shared_address(&control_.q_full);
    mbarrier_arrive_expect(barrier, Layout::kQBytes);
    for (int group = 0; group < kGroups; ++group) {
      for (int piece = 0; piece < kDim / kPieceColumns; ++piece) {
        copy_tensor_4d(q_ + (group * (kDim / kPieceColumns) + piece) * kPieceBytes, &maps_.q,
                       barrier, piece * kPieceColumns, tile.h, tile.base + group * kGroupRows,
                       tile.b);
      }
    }
  }

  // The barrier must not complete before the flags are there: the box that is written last is loaded
  // last.
  __device__ void load_box(const Box& box, int place, int b, int kv_head, int first_column) {
    const std::uint32_t barrier = shared_address(&control_.full[at_.stage]);
    const std::uint32_t to = stages_ + at_.stage * Layout::kStageBytes + place * kPieceBytes;
    control_.boxes[at_.stage][place] = box;
    const bool columns = (box.flags & Box::kColumns) != 0;
    const CUtensorMap* keys = columns ? &maps_.column_keys : &maps_.k;
    const CUtensorMap* values = columns ? &maps_.column_values : &maps_.v;
    const int head = columns ? 0 : kv_head;
    const int token = columns ? first_column + box.start : box.start;
    const int sequence = columns ? 0 : b;
    for (int piece = 0; piece < kDim / kPieceColumns; ++piece) {
      copy_tensor_4d(to + piece * kBoxes * kPieceBytes, keys, barrier, piece * kPieceColumns, head, token,
                     sequence);
    }
    for (int piece = 0; piece < kVDim / kPieceColumns; ++piece) {
      copy_tensor_4d(to + Layout::kKeyBytes + piece * kBoxes * kPieceBytes, values, barrier,
                     piece * kPieceColumns, head, token, sequence);
    }
  }

  const Problem& problem_;
  const DeviceIndex& index_;
  const Maps& maps_;
  typename Layout::Control& control_;
  std::uint32_t q_;
  std::uint32_t stages_;
  Cursor<Layout::kStages> at_;
};

template <class T, int kDim, int kVDim, int kBoxes>
class Consumer {
  using Layout = Shared<kDim, kVDim, kBoxes>;
  static constexpr int kStages = Layout::kStages;
  static constexpr int kKeys = kBoxes * kBoxKeys;
  // Where they fit, queries stay in registers: the product with 64 keys then reads these alone from
  // shared memory, whose bandwidth it would exceed otherwise.
  static constexpr bool kQInRegisters = kDim * kBoxes <= 128;
  static constexpr int kQSteps = kDim / 16;
  static constexpr int kScores = kKeys / 2;  // registers of an accumulator of 64 rows
  static constexpr int kOutputs = kVDim / 2;

 public:
  __device__ __forceinline__ Consumer(const Problem& problem, const DeviceIndex& index,
                      typename Layout::Control& control, std::uint32_t q, char* stages, int group)
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
        inverse_cap_(problem.soft_cap > 0 ? 1.0F / problem.soft_cap : 0.0F) {}

  __device__ __forceinline__ void run() {
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
      write_rows();
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
      ldmatrix_x4(queries_[step],
                  q_ + step / 4 * kPieceBytes + r * 128 + ((chunk ^ (r % 8)) * 16));
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
        weights_[step][i] =
            pack_pair<T>(scores_[step * 8 + i * 2], scores_[step * 8 + i * 2 + 1]);
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
        if (problem_.soft_cap > 0) score = capped(score);
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
        growth_[half] = raised == -kInfinity
                            ? 1.0F
                            : exp2_fast(maximum_[half] - raised);
        maximum_[half] = raised;
        sum_[half] *= growth_[half];
      }
      shift[half] =
          maximum_[half] == -kInfinity ? 0.0F : maximum_[half];
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

  // soft_cap * tanh(score / soft_cap), by tanh(x) = 1 - 2 / (1 + e^2x).
  __device__ __forceinline__ float capped(float score) const {
    const float power = exp2_fast(score * (2 * kLog2E * inverse_cap_));
    return problem_.soft_cap * (1.0F - __fdividef(2.0F, 1.0F + power));
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
        const std::uint64_t visible =
            visible_bits(problem_, index_, geometry, tile_, control_.boxes[at_.stage][place],
                         group_, row(half));
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

  __device__ __forceinline__ void write_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      float shift = maximum_[half];
      // A sum of exactly 0 is a row that saw no key.
      float weight = sum == 0 ? 0.0F : 1.0F / sum;
      if (problem_.sinks != nullptr) {
        const float sink = problem_.sinks[tile_.h] * kLog2E;
        if (sum == 0 || sink > shift) {
          const float factor = sum == 0 ? 0.0F : exp2_fast(shift - sink);
          sum = sum * factor + 1.0F;
          weight = factor / sum;
          shift = sink;
        } else {
          sum += exp2_fast(sink - shift);
          weight = 1.0F / sum;
        }
      }
      const int r = row(half);
      if (!asked_for(r)) continue;
      if (problem_.lse.data != nullptr && lane() % 4 == 0) {
        const DeviceTensor& lse = problem_.lse;
        reinterpret_cast<float*>(lse.data)[tile_.b * lse.batch_stride + r * lse.token_stride +
                                           tile_.h * lse.head_stride] =
            sum == 0 ? -kInfinity : (shift + log2f(sum)) * kLn2;
      }
      const DeviceTensor& out = problem_.out;
      const std::int64_t begin =
          tile_.b * out.batch_stride + r * out.token_stride + tile_.h * out.head_stride;
#pragma unroll
      for (int i = 0; i < kVDim / 8; ++i) {
        const int column = i * 8 + lane() % 4 * 2;
        store_pair(out, begin + column, problem_.v_dim - column, outputs_[i * 4 + half * 2] * weight,
                   outputs_[i * 4 + half * 2 + 1] * weight);
      }
    }
  }

  // Stores up to `left` of two neighbours.
  __device__ __forceinline__ static void store_pair(const DeviceTensor& out, std::int64_t at, int left, float a,
                                    float b) {
    if (left <= 0) return;
    if (out.dtype == DType::kF32) {
      float* to = reinterpret_cast<float*>(out.data) + at;
      to[0] = a;
      if (left > 1) to[1] = b;
      return;
    }
    const std::uint32_t packed = out.dtype == DType::kBF16 ? pack_pair<__nv_bfloat16>(a, b)
                                                           : pack_pair<__half>(a, b);
    std::uint16_t* to = reinterpret_cast<std::uint16_t*>(out.data) + at;
    if (left > 1 && (reinterpret_cast<std::uintptr_t>(to) & 3) == 0) {
      *reinterpret_cast<std::uint32_t*>(to) = packed;
      return;
    }
    to[0] = static_cast<std::uint16_t>(packed);
    if (left > 1) to[1] = static_cast<std::uint16_t>(packed >> 16);
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
  float inverse_cap_;
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

template <class T, int kDim, int kVDim, int kBoxes>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ DeviceIndex index,
           const __grid_constant__ Maps maps, int* ticket) {
  using Layout = Shared<kDim, kVDim, kBoxes>;
  extern __shared__ char memory[];
  char* aligned = memory + (1024 - shared_address(memory) % 1024) % 1024;
  char* q = aligned;
  char* stages = aligned + Layout::kQBytes;
  auto& control = *reinterpret_cast<typename Layout::Control*>(
      aligned + Layout::kQBytes + Layout::kStages * Layout::kStageBytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      mbarrier_init(shared_address(&control.full[stage]), 1);
      mbarrier_init(shared_address(&control.empty[stage]), kConsumers * 4);
    }
    mbarrier_init(shared_address(&control.q_full), 1);
    mbarrier_init(shared_address(&control.q_empty), kConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == 0) {
    release_registers<kProducerRegisters<kDim, kBoxes>>();
    if (threadIdx.x < 32) {
      Producer<kDim, kVDim, kBoxes> producer(problem, index, maps, control, shared_address(q),
                                             shared_address(stages));
      producer.run(ticket);
    }
  } else {
    take_registers<kConsumerRegisters<kDim, kBoxes>>();
    Consumer<T, kDim, kVDim, kBoxes> consumer(problem, index, control, shared_address(q), stages,
                                      warpgroup - 1);
    consumer.run();
  }
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: nothing links the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "looking for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      throw Unsupported("this CUDA driver has no cuTensorMapEncodeTiled; needed: driver 525 or newer");
    }
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// Boxes of 64 tokens x 64 dims of one head.
CUtensorMap tensor_map(const DeviceTensor& tensor, std::int64_t dim, std::int64_t heads,
                       std::int64_t tokens, std::int64_t batch) {
  CUtensorMap map{};
  if (tokens == 0 || tensor.data == nullptr) return map;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batch)};
  // A stride along an axis of extent 1 is never followed, but must be legal.
  const auto bytes = [&](std::int64_t stride, std::int64_t extent) {
    return static_cast<cuuint64_t>(extent > 1 ? stride * 2 : 16);
  };
  const cuuint64_t strides[3] = {bytes(tensor.head_stride, heads),
                                 bytes(tensor.token_stride, tokens),
                                 bytes(tensor.batch_stride, batch)};
  const cuuint32_t box[4] = {kPieceColumns, 1, kBoxKeys, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result = encode_tiled()(
      &map,
      tensor.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Unsupported("the CUDA driver refused a tensor map (CUresult " +
                      std::to_string(static_cast<int>(result)) + ")");
  }
  return map;
}

DeviceTensor dense_rows(char* data, std::int64_t dim, DType dtype) {
  DeviceTensor tensor;
  tensor.data = data;
  tensor.token_stride = dim;
  tensor.dtype = dtype;
  return tensor;
}

template <class T, int kDim, int kVDim, int kBoxes>
void launch(const Problem& problem, const DeviceIndex& index, const Maps& maps, int* ticket,
            cudaStream_t stream) {
  constexpr int kBytes = Shared<kDim, kVDim, kBoxes>::kBytes;
  const auto kernel = attend<T, kDim, kVDim, kBoxes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<multiprocessors(), kThreads, kBytes, stream>>>(problem, index, maps, ticket);
  check(cudaGetLastError(), "starting the sm_90a attention kernel");
}

template <class T>
void launch_dims(const Problem& problem, const DeviceIndex& index, const Maps& maps, int* ticket,
                 cudaStream_t stream) {
  const int larger = std::max(problem.dim, problem.v_dim);
  // Two boxes at a time halve the cost of a step, where hardly any box is one group's alone.
  const bool pairs = index.heads == nullptr;
  if (larger <= 64) {
    return pairs ? launch<T, 64, 64, 2>(problem, index, maps, ticket, stream)
                 : launch<T, 64, 64, 1>(problem, index, maps, ticket, stream);
  }
  if (larger <= 128) {
    return pairs ? launch<T, 128, 128, 2>(problem, index, maps, ticket, stream)
                 : launch<T, 128, 128, 1>(problem, index, maps, ticket, stream);
  }
  if (larger <= 192 && problem.v_dim <= 128) {
    return launch<T, 192, 128, 1>(problem, index, maps, ticket, stream);
  }
  if (larger <= 192) return launch<T, 192, 192, 1>(problem, index, maps, ticket, stream);
  return launch<T, 256, 256, 1>(problem, index, maps, ticket, stream);
}

bool bulk_copies_follow(const DeviceTensor& tensor, std::int64_t dim, std::int64_t heads,
                        std::int64_t tokens, std::int64_t batch) {
  const auto legal = [](std::int64_t stride, std::int64_t extent) {
    return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride < (std::int64_t{1} << 39));
  };
  return dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         legal(tensor.head_stride, heads) && legal(tensor.token_stride, tokens) &&
         legal(tensor.batch_stride, batch);
}

}  // namespace

bool sm90_takes(const Problem& p) {
  return p.q.dtype != DType::kF32 && p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype &&
         p.block_table == nullptr && p.kv_tokens > 0 &&
         bulk_copies_follow(p.q, p.dim, p.q_heads, p.q_tokens, p.batch) &&
         bulk_copies_follow(p.k, p.dim, p.kv_heads, p.kv_tokens, p.batch) &&
         bulk_copies_follow(p.v, p.v_dim, p.kv_heads, p.kv_tokens, p.batch);
}

void sm90_attention(const Problem& p, const DeviceIndex& index, const GatheredColumns& columns,
                    int* ticket, cudaStream_t stream) {
  Maps maps;
  maps.q = tensor_map(p.q, p.dim, p.q_heads, p.q_tokens, p.batch);
  maps.k = tensor_map(p.k, p.dim, p.kv_heads, p.kv_tokens, p.batch);
  maps.v = tensor_map(p.v, p.v_dim, p.kv_heads, p.kv_tokens, p.batch);
  maps.column_keys = tensor_map(dense_rows(columns.keys, p.dim, p.k.dtype), p.dim, 1,
                                index.column_capacity, 1);
  maps.column_values = tensor_map(dense_rows(columns.values, p.v_dim, p.v.dtype), p.v_dim, 1,
                                  index.column_capacity, 1);
  check(cudaMemsetAsync(ticket, 0, sizeof(int), stream), "clearing the ticket");
  if (p.q.dtype == DType::kBF16) {
    launch_dims<__nv_bfloat16>(p, index, maps, ticket, stream);
  } else {
    launch_dims<__half>(p, index, maps, ticket, stream);
  }
}

}  // namespace minference::cuda

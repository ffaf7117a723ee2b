// Each warp holds 16 rows of a tile; a lane has two keys of a box when scores are summed, and two of
// every 64 dims when values are. Queries, keys and values pass through shared memory as f32, 64 dims
// at a time, so that any head dim and any dtype takes one path.
#include "attention/cuda/f32_attention.h"

#include <cmath>

#include "attention/cuda/box_ring.cuh"
#include "attention/cuda/check.h"
#include "attention/cuda/elements.cuh"
#include "attention/cuda/row_bits.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/tile_order.cuh"

namespace minference::cuda {
namespace {

constexpr int kWarpRows = 16;
constexpr int kWarps = kTileRows / kWarpRows;
constexpr int kThreads = kWarps * 32;
constexpr int kDims = 64;  // at a time
constexpr int kMaxDim = 256;
constexpr int kPitch = kDims + 1;  // of keys: lanes read the same dim of different rows

struct Shared {
  BoxRing ring;
  RowTile tile;  // row_end 0: there is no more work
  unsigned long long kept;
  std::uint64_t visible[kTileRows];
  alignas(16) float queries[kTileRows * kDims];
  alignas(16) float weights[kTileRows * kBoxKeys];
  alignas(16) float rows[kBoxKeys * kPitch];  // keys with this pitch, values with kDims
};

class Block {
 public:
  __device__ __forceinline__ Block(const Problem& problem, const DeviceIndex& index, Shared& shared)
      : problem_(problem), index_(index), shared_(shared), tile_(shared.tile) {}

  __device__ __forceinline__ void run(int* ticket, bool repair) {
    const TileOrder order(problem_);
    if (threadIdx.x == 0) shared_.kept = 0;
    for (;;) {
      __syncthreads();
      if (threadIdx.x == 0) draw_tile(order, ticket);
      __syncthreads();
      if (tile_.row_end == 0) break;
      if (repair && __syncthreads_and(output_is_finite())) continue;
      attend();
      write_rows();
    }
    if (threadIdx.x == 0 && problem_.kept_pairs != nullptr) {
      atomicAdd(problem_.kept_pairs, shared_.kept);
    }
  }

 private:
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ int group() const { return warp() * kWarpRows / kGroupRows; }
  __device__ __forceinline__ int row(int r) const { return tile_.base + warp() * kWarpRows + r; }
  __device__ __forceinline__ bool asked_for(int row) const {
    return row >= tile_.row_begin && row < tile_.row_end;
  }

  __device__ __forceinline__ void draw_tile(const TileOrder& order, int* ticket) {
    for (;;) {
      const int turn = atomicAdd(ticket, 1);
      if (turn >= order.count()) {
        shared_.tile.row_end = 0;
        return;
      }
      RowTile tile;
      if (!order.tile(index_, turn, tile)) continue;
      shared_.tile = tile;
      return;
    }
  }

  __device__ __forceinline__ bool output_is_finite() const {
    bool finite = true;
    for (int r = 0; r < kWarpRows; ++r) {
      if (!asked_for(row(r))) continue;
      const char* out = tensor_row(problem_.out, tile_.b, row(r), tile_.h);
      for (int d = lane(); d < problem_.v_dim; d += 32) {
        finite = finite && isfinite(load_element(out, problem_.out.dtype, d));
      }
    }
    return finite;
  }

  __device__ __forceinline__ void attend() {
    maximum_ = -kInfinity;
    sum_ = 0;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
      for (int i = 0; i < kMaxDim / 32; ++i) outputs_[r][i] = 0;
    }
    if (warp() == 0) shared_.ring.start(problem_, index_, tile_);
    __syncthreads();
    for (int at = 0;; ++at) {
      const Box& box = shared_.ring.boxes[at % BoxRing::kBoxes];
      if ((box.flags & Box::kEndOfTile) != 0) break;
      if (at % BoxRing::kBatch == 0 && warp() == 0) {
        shared_.ring.make_batch(at / BoxRing::kBatch + 1);
      }
      attend_box(box);
    }
  }

  __device__ __forceinline__ void attend_box(const Box& box) {
    const bool used = box.used_by(group());
    float scores[kWarpRows][2] = {};
    const bool columns = (box.flags & Box::kColumns) != 0;
    const BoxRows keys(problem_, index_, tile_, box.start, columns, problem_.k);
#pragma unroll 1
    for (int first = 0; first < problem_.dim; first += kDims) {
      __syncthreads();
      load_queries(first);
      load_rows(keys, problem_.k.dtype, first, problem_.dim, kPitch);
      __syncthreads();
      if (used) add_scores(scores);
    }
    if (used) softmax(scores, box);
    const BoxRows values(problem_, index_, tile_, box.start, columns, problem_.v);
#pragma unroll
    for (int part = 0; part < kMaxDim / kDims; ++part) {
      const int first = part * kDims;
      if (first >= problem_.v_dim) break;
      __syncthreads();
      const bool finite = load_rows(values, problem_.v.dtype, first, problem_.v_dim, kDims);
      if (__syncthreads_and(finite)) {
        if (used) add_values<false>(part);
      } else {
        if (used) add_values<true>(part);
      }
    }
  }

  __device__ __forceinline__ void load_queries(int first) {
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x); at < kTileRows * kDims; at += kThreads) {
      const int d = first + at % kDims;
      const int r = tile_.base + at / kDims;
      float value = 0;
      if (d < problem_.dim && asked_for(r)) {
        value = load_element(tensor_row(problem_.q, tile_.b, r, tile_.h), problem_.q.dtype, d);
      }
      shared_.queries[at] = value;
    }
  }

  // Dims first ... first + kDims; what does not exist is 0. False where a value is not finite.
  __device__ __forceinline__ bool load_rows(const BoxRows& source, DType dtype, int first, int dim,
                                            int pitch) {
    bool finite = true;
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x); at < kBoxKeys * kDims; at += kThreads) {
      const int d = first + at % kDims;
      const char* const from = d < dim ? source.row(at / kDims) : nullptr;
      const float value = from != nullptr ? load_element(from, dtype, d) : 0.0F;
      finite = finite && isfinite(value);
      shared_.rows[at / kDims * pitch + at % kDims] = value;
    }
    return finite;
  }

  __device__ __forceinline__ void add_scores(float (&scores)[kWarpRows][2]) const {
    const float* const keys = shared_.rows + lane() * kPitch;
    const float* const queries = shared_.queries + warp() * kWarpRows * kDims;
#pragma unroll 2
    for (int d = 0; d < kDims; d += 4) {
      float key[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        key[0][i] = keys[d + i];
        key[1][i] = keys[32 * kPitch + d + i];
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(queries + r * kDims + d);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          scores[r][k] = fmaf(q.x, key[k][0], scores[r][k]);
          scores[r][k] = fmaf(q.y, key[k][1], scores[r][k]);
          scores[r][k] = fmaf(q.z, key[k][2], scores[r][k]);
          scores[r][k] = fmaf(q.w, key[k][3], scores[r][k]);
        }
      }
    }
  }

  // Leaves the keys that each row sees in shared memory.
  __device__ __forceinline__ void mask(const Box& box) {
    std::uint64_t* const visible = shared_.visible + warp() * kWarpRows;
    const Geometry geometry = sequence_geometry(problem_, tile_.b);
    int kept = 0;
    __syncwarp();
#pragma unroll 1
    for (int r = lane() / 4; r < kWarpRows; r += 8) {
      std::uint64_t bits = ~0ULL;
      if (box.masked_for(group())) {
        bits = visible_bits(problem_, index_, geometry, tile_, box, group(), row(r));
      }
      if (lane() % 4 == 0) {
        visible[r] = bits;
        if (asked_for(row(r))) kept += __popcll(bits);
      }
    }
    __syncwarp();
    if (problem_.kept_pairs == nullptr) return;
    kept = __reduce_add_sync(~0U, kept);
    if (lane() == 0) atomicAdd(&shared_.kept, static_cast<unsigned long long>(kept));
  }

  // Leaves the rows' weights in shared memory.
  __device__ __forceinline__ void softmax(float (&scores)[kWarpRows][2], const Box& box) {
    mask(box);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const std::uint64_t visible = shared_.visible[warp() * kWarpRows + r];
      const float before = __shfl_sync(~0U, maximum_, r);
      float largest = before;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float score = scores[r][k] * problem_.scale;
        if (problem_.soft_cap > 0) score = problem_.soft_cap * tanhf(score / problem_.soft_cap);
        if ((visible >> (lane() + k * 32) & 1) == 0) score = -kInfinity;
        scores[r][k] = score;
        largest = fmaxf(largest, score);
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
      }
      // Rows that have seen nothing keep -inf, and a difference of infinities is none.
      const float growth = largest == -kInfinity ? 1.0F : expf(before - largest);
      const float shift = largest == -kInfinity ? 0.0F : largest;
#pragma unroll
      for (int i = 0; i < kMaxDim / 32; ++i) outputs_[r][i] *= growth;
      float sum = 0;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float weight = expf(scores[r][k] - shift);
        sum += weight;
        shared_.weights[(warp() * kWarpRows + r) * kBoxKeys + lane() + k * 32] = weight;
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0U, sum, distance);
      }
      if (lane() == r) {
        maximum_ = largest;
        sum_ = sum_ * growth + sum;
      }
    }
    __syncwarp();
  }

  // kHidden: leaves out the keys that a row does not see. Their weights are 0, but 0 * NaN is not.
  template <bool kHidden>
  __device__ __forceinline__ void add_values(int part) {
    const float* const values = shared_.rows + lane();
    const float* const weights = shared_.weights + warp() * kWarpRows * kBoxKeys;
    const std::uint64_t* const visible = shared_.visible + warp() * kWarpRows;
#pragma unroll 2
    for (int key = 0; key < kBoxKeys; key += 4) {
      float value[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[0][i] = values[(key + i) * kDims];
        value[1][i] = values[(key + i) * kDims + 32];
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float4 weight = *reinterpret_cast<const float4*>(weights + r * kBoxKeys + key);
        const unsigned seen = kHidden ? static_cast<unsigned>(visible[r] >> key) : ~0U;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& output = outputs_[r][part * 2 + k];
          if (seen & 1) output = fmaf(weight.x, value[k][0], output);
          if (seen & 2) output = fmaf(weight.y, value[k][1], output);
          if (seen & 4) output = fmaf(weight.z, value[k][2], output);
          if (seen & 8) output = fmaf(weight.w, value[k][3], output);
        }
      }
    }
  }

  __device__ __forceinline__ void write_rows() {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      RowSum total;
      total.shift = __shfl_sync(~0U, maximum_, r) * kLog2E;
      total.sum = __shfl_sync(~0U, sum_, r);
      const float weight = total.close(problem_.sinks, tile_.h);
      if (!asked_for(row(r))) continue;
      if (lane() == 0) store_lse(problem_, tile_.b, row(r), tile_.h, total.lse());
      char* const to = tensor_row(problem_.out, tile_.b, row(r), tile_.h);
#pragma unroll
      for (int i = 0; i < kMaxDim / 32; ++i) {
        const int d = i * 32 + lane();
        // A sum of 0 is a row that saw nothing, whatever is in the values.
        const float value = weight == 0 && total.sum == 0 ? 0.0F : outputs_[r][i] * weight;
        if (d < problem_.v_dim) store_element(to, problem_.out.dtype, d, value);
      }
    }
  }

  const Problem& problem_;
  const DeviceIndex& index_;
  Shared& shared_;
  const RowTile& tile_;
  float outputs_[kWarpRows][kMaxDim / 32];  // dims lane, lane + 32 ...
  // Of row `lane`.
  float maximum_ = 0;
  float sum_ = 0;
};

// needed null: every tile.
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ Problem problem, const __grid_constant__ DeviceIndex index,
           const int* needed, int* ticket) {
  if (needed != nullptr && *needed == 0) return;
  extern __shared__ __align__(128) char memory[];
  Block block(problem, index, *reinterpret_cast<Shared*>(memory));
  block.run(ticket, needed != nullptr);
}

void launch(const Problem& problem, const DeviceIndex& index, const int* needed, int* ticket,
            cudaStream_t stream) {
  allow_shared_memory(reinterpret_cast<const void*>(attend), sizeof(Shared));
  attend<<<multiprocessors(), kThreads, sizeof(Shared), stream>>>(problem, index, needed, ticket);
  check(cudaGetLastError(), "starting attention in f32");
}

}  // namespace

void f32_attention(const Problem& problem, const DeviceIndex& index, int* ticket,
                   cudaStream_t stream) {
  check(cudaMemsetAsync(ticket, 0, sizeof(int), stream), "clearing a ticket");
  launch(problem, index, nullptr, ticket, stream);
}

void repair_non_finite(const Problem& problem, const DeviceIndex& index, const int* needed,
                       int* ticket, cudaStream_t stream) {
  Problem uncounted = problem;
  uncounted.kept_pairs = nullptr;
  launch(uncounted, index, needed, ticket, stream);
}

}  // namespace minference::cuda

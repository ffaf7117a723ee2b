// The kernels of a row pass. Two producer warps fetch tiles of keys; a warpgroup a query head
// multiplies them with its queries and sums up. A tile holds 16 keys from each of four distant ranges:
// every warp walks a range of its own, so that sums along its keys stay in registers.
#pragma once

#include <algorithm>

#include "attention/cuda/check.h"
#include "index/cuda/row_pass_task.cuh"
#include "index/cuda/row_softmax.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::row_pass {

template <class Rows, int kPanels>
__device__ void load_queries(const Arguments& a, const Task& task, std::uint32_t queries) {
  const int chunk = static_cast<int>(threadIdx.x) % kChunkDims;
  for (int i = static_cast<int>(threadIdx.x) / kChunkDims; i < a.plan.heads * kPassRows;
       i += static_cast<int>(blockDim.x) / kChunkDims) {
    const int head = i / kPassRows;
    const int row = Rows::row(a, task.geometry, i % kPassRows);
    const bool exists = row >= 0 && (task.active >> head & 1) != 0;
    const char* from = query_row(
        a.problem, task.b, exists ? task.kv_head * a.problem.group + task.first_in_group + head : 0,
        exists ? row : 0);
    load_row_chunks<kPanels>(queries + head * kPanels * kPanelBytes, i % kPassRows, chunk, from,
                             exists, a.problem.dim, a.chunks);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_for_products();
}

// A producer warp's share of the tiles: the keys of two ranges.
template <int kPanels>
class KeyLoader {
 public:
  __device__ KeyLoader(const Arguments& a, const Task& task)
      : a_(a), task_(task), chunk_(lane() % kChunkDims) {
    first_row_ = (static_cast<int>(threadIdx.x) / 32 - a.plan.heads * 4) * kRows;
    first_key_ = task.first_key + first_row_ / kStepKeys * task.range_step;
    // Rows lie where those of the first step do, a step's keys further on.
    plain_ = a.chunks == Chunks::kWhole && a.problem.block_table == nullptr &&
             a.problem.dim == kPanels * kPanelDims;
    if (!plain_) return;
    const std::int64_t row_bytes = a.problem.k.token_stride * 2;
    four_rows_ = 4 * row_bytes;
    step_ = kStepKeys * row_bytes;
    from_ = key_row(a.problem, task.b, task.kv_head, 0) + chunk_ * kChunkDims * 2 +
            (first_key_ + lane() / kChunkDims) * row_bytes;
    range_ = task.range_step * row_bytes;
  }

  __device__ void load(int step, std::uint32_t tile) {
    const int first_key = first_key_ + step * kStepKeys;
    const int last_key = first_key + task_.range_step + kStepKeys - 1;
    if (plain_ && first_key >= 0 && last_key < task_.geometry.kv_len) {
      load_plain(tile);
    } else {
      load_any(step, tile);
    }
    from_ += step_;
  }

 private:
  static constexpr int kRows = kTileTokens / kProducerWarps;

  __device__ void load_plain(std::uint32_t tile) const {
    // Rows 4 apart are swizzled in one of two ways.
    const int row = first_row_ + lane() / kChunkDims;
    const std::uint32_t even = tile + chunk_offset(row, chunk_);
    const std::uint32_t odd = tile + chunk_offset(row + 4, chunk_);
#pragma unroll
    for (int range = 0; range < kRows / kStepKeys; ++range) {
      const char* from = from_ + range * range_;
#pragma unroll
      for (int i = 0; i < kStepKeys / 4; ++i, from += four_rows_) {
        const std::uint32_t to = (i % 2 == 0 ? even : odd) + (range * kStepKeys + i / 2 * 8) * 128;
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          cp_async_16(to + p * kPanelBytes, from + p * kPanelDims * 2, true);
        }
      }
    }
  }

  __device__ void load_any(int step, std::uint32_t tile) const {
#pragma unroll 1
    for (int i = 0; i < kRows; i += 4) {
      const int row = i + lane() / kChunkDims;
      const int key =
          first_key_ + row / kStepKeys * task_.range_step + step * kStepKeys + row % kStepKeys;
      const bool exists = key >= 0 && key < task_.geometry.kv_len;
      load_row_chunks<kPanels>(tile, first_row_ + row, chunk_,
                               key_row(a_.problem, task_.b, task_.kv_head, exists ? key : 0),
                               exists, a_.problem.dim, a_.chunks);
    }
  }

  const Arguments& a_;
  const Task& task_;
  int chunk_;
  int first_row_;
  int first_key_;
  bool plain_;
  const char* from_ = nullptr;  // the lane's chunk of its first row
  std::int64_t four_rows_ = 0;  // bytes
  std::int64_t step_ = 0;
  std::int64_t range_ = 0;
};

// Executed by the producer warps.
template <int kPanels>
__device__ void produce(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t full, std::uint32_t empty) {
  constexpr int kAhead = 2;  // tiles in flight of one thread
  KeyLoader<kPanels> loader(a, task);
  int stage = 0;
  std::uint32_t parity = 1;  // the first round finds every stage empty
  int landed = 0;            // stage of the next tile to announce
  const auto announce = [&] {
    fence_for_products();
    arrive_at(full + landed * 8);
    landed = landed + 1 == kStages ? 0 : landed + 1;
  };
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(empty + stage * 8, parity);
    loader.load(step, tiles + stage * kPanels * kPanelBytes);
    cp_async_commit();
    if (step >= kAhead) {
      cp_async_wait<kAhead>();
      announce();
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  cp_async_wait<0>();
  for (int step = max(task.steps - kAhead, 0); step < task.steps; ++step) announce();
}

// What a warp does with the scores of one head and its range of keys: the first kernel of an
// estimator, which leaves the partial sums of the softmax.
template <class TheRows>
class StatsOfHead {
 public:
  using Rows = TheRows;
  static constexpr bool kNeedsKeys = false;  // blocks without keys say so

  // Row `head` of the sums, head `local` of the block; all but end() by a whole warpgroup.
  __device__ StatsOfHead(const Arguments& a, const Task&, Control<Rows>& control, std::int64_t head,
                         int local)
      : sums_(control.maxima[local][static_cast<int>(threadIdx.x) % 128 / 32]),
        of_warps_(control.partials[local]),
        to_(a.partials + (head * a.plan.chunks + blockIdx.x) * kPassRows) {}

  __device__ void add(const float (&scores)[kScores], float factor, int, int octet) {
    sums_.add(scores, factor, octet);
  }

  __device__ void end() {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    sums_.store(of_warps_[thread / 32]);
    named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);
    if (thread < kPassRows) {
      to_[thread] = merged(merged(of_warps_[0][thread], of_warps_[1][thread]),
                           merged(of_warps_[2][thread], of_warps_[3][thread]));
    }
  }

 private:
  SoftmaxSums sums_;
  float2 (&of_warps_)[kRanges][kPassRows];
  float2* to_;
};

// Executed by a warpgroup for the block's head `local`.
template <class T, int kPanels, class OfHead, class Arguments>
__device__ void consume(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t queries, std::uint32_t full, std::uint32_t empty,
                        Control<typename OfHead::Rows>& control, int local) {
  OfHead sums(a, task, control, head_of_block(a, task, local), local);
  named_barrier(1 + local, 128);
  const Scorer<typename OfHead::Rows> scorer(a, task, control.rows);
  const int range_begin =
      task.first_key + static_cast<int>(threadIdx.x) % 128 / 32 * task.range_step;
  int stage = 0;
  std::uint32_t parity = 0;
  int octet = 0;  // those before hold queries that see none of the keys
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(full + stage * 8, parity);
    const int first_key = range_begin + step * kStepKeys;
    octet = OfHead::Rows::first_octet(control.rows, first_key, octet);
    float scores[kScores];
    start_products<T, kPanels>(tiles + stage * kPanels * kPanelBytes, queries, scores, octet);
    finish_products(scores);
    if (lane() == 0) arrive_at(empty + stage * 8);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    scorer.apply(first_key, octet, scores);
    sums.add(scores, scorer.factor(), first_key, octet);
  }
  sums.end();
}

// OfHead sums up; `Arguments` are row_pass::Arguments or derive from them.
template <class T, int kPanels, class OfHead, class Arguments>
__global__ void __launch_bounds__(kMaxThreads, 1)
    row_pass_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  using Rows = typename OfHead::Rows;
  __shared__ Control<Rows> control;
  // Not in registers, which are short.
  __shared__ Task task;
  if (threadIdx.x == 0) task = task_of_block<Rows>(a);
  __syncthreads();
  if (task.active == 0 || (OfHead::kNeedsKeys && task.steps == 0)) return;
  if constexpr (requires { OfHead::is_idle(a, task); }) {
    if (OfHead::is_idle(a, task)) return;
  }
  // The swizzle counts from multiples of 1,024 bytes.
  const std::uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023U;
  constexpr int kTileBytes = kPanels * kPanelBytes;
  const std::uint32_t tiles = queries + a.plan.heads * kTileBytes;
  const std::uint32_t full = shared_address(control.full);
  const std::uint32_t empty = shared_address(control.empty);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s * 8, 32 * kProducerWarps);
      mbarrier_init(empty + s * 8, 4 * __popc(task.active));
    }
  }
  Rows::prepare(a, task.geometry, control.rows);
  load_queries<Rows, kPanels>(a, task, queries);
  __syncthreads();
  const int local = static_cast<int>(threadIdx.x) / 128;
  if (local == a.plan.heads) {
    produce<kPanels>(a, task, tiles, full, empty);
  } else if ((task.active >> local & 1) != 0) {
    consume<T, kPanels, OfHead>(a, task, tiles, queries + local * kTileBytes, full, empty, control,
                                local);
  }
}

// Enqueues a pass over `count` units.
template <class T, class OfHead, class Arguments>
void launch_of_type(const Arguments& arguments, int count, cudaStream_t stream) {
  const dim3 grid(arguments.plan.chunks, count * arguments.plan.head_groups);
  const int bytes = arguments.plan.shared_bytes;
  const int threads = 128 * arguments.plan.heads + 32 * kProducerWarps;
  const auto start = [&](auto* kernel) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    kernel<<<grid, threads, bytes, stream>>>(arguments);
    check(cudaGetLastError(), "starting an estimate");
  };
  switch (arguments.plan.panels) {
    case 1:
      return start(row_pass_kernel<T, 1, OfHead, Arguments>);
    case 2:
      return start(row_pass_kernel<T, 2, OfHead, Arguments>);
    default:
      return start(row_pass_kernel<T, 4, OfHead, Arguments>);
  }
}

template <class OfHead, class Arguments>
void launch(const Arguments& arguments, int count, cudaStream_t stream) {
  if (arguments.problem.q.dtype == DType::kF16) {
    launch_of_type<__half, OfHead>(arguments, count, stream);
  } else {
    launch_of_type<__nv_bfloat16, OfHead>(arguments, count, stream);
  }
}

}  // namespace minference::cuda::row_pass

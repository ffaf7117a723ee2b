// Two producer warps fetch tiles of keys; a warpgroup a query head multiplies them with its queries
// and sums up. A tile holds 16 keys from each of four distant ranges: every warp walks a range of its
// own, so that its diagonal sums stay in registers until no later key can add to them.
#include "index/cuda/last_q.h"

#include "attention/cuda/check.h"
#include "index/cuda/last_q_sums.cuh"
#include "index/cuda/last_q_task.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

using namespace last_q;  // NOLINT(google-build-using-namespace): this file is its front

template <int kPanels>
__device__ void load_queries(const Arguments& a, const Task& task, std::uint32_t queries) {
  const int chunk = static_cast<int>(threadIdx.x) % kChunkDims;
  for (int i = static_cast<int>(threadIdx.x) / kChunkDims; i < a.plan.heads * kLastRows;
       i += static_cast<int>(blockDim.x) / kChunkDims) {
    const int head = i / kLastRows;
    const int row = task.geometry.q_len - kLastRows + i % kLastRows;
    const bool exists = row >= 0 && (task.active >> head & 1) != 0;
    const char* from = query_row(
        a.problem, task.b, exists ? task.kv_head * a.problem.group + task.first_in_group + head : 0,
        exists ? row : 0);
    load_row_chunks<kPanels>(queries + head * kPanels * kPanelBytes, i % kLastRows, chunk, from,
                             exists, a.problem.dim, a.aligned);
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
    first_key_ = task.first_key + first_row_ / kStepKeys * a.plan.range;
    // Rows lie where those of the first step do, a step's keys further on.
    plain_ = a.aligned && a.problem.block_table == nullptr && a.problem.dim == kPanels * kPanelDims;
    if (!plain_) return;
    const std::int64_t row_bytes = a.problem.k.token_stride * 2;
    four_rows_ = 4 * row_bytes;
    step_ = kStepKeys * row_bytes;
    from_ = key_row(a.problem, task.b, task.kv_head, 0) + chunk_ * kChunkDims * 2 +
            (first_key_ + lane() / kChunkDims) * row_bytes;
    range_ = a.plan.range * row_bytes;
  }

  __device__ void load(int step, std::uint32_t tile) {
    const int last_key = first_key_ + a_.plan.range + (step + 1) * kStepKeys - 1;
    if (plain_ && last_key < task_.geometry.kv_len) {
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
          first_key_ + row / kStepKeys * a_.plan.range + step * kStepKeys + row % kStepKeys;
      const bool exists = key < task_.geometry.kv_len;
      load_row_chunks<kPanels>(tile, first_row_ + row, chunk_,
                               key_row(a_.problem, task_.b, task_.kv_head, exists ? key : 0),
                               exists, a_.problem.dim, a_.aligned);
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

// What a warp does with the scores of one head and its range of keys: the first kernel.
class StatsOfHead {
 public:
  static constexpr bool kNeedsKeys = false;  // blocks without keys say so

  // Row `head` of the sums, head `local` of the block; all but end() by a whole warpgroup.
  __device__ StatsOfHead(const Arguments& a, const Task&, Control& control, std::int64_t head,
                         int local)
      : sums_(control.maxima[local][static_cast<int>(threadIdx.x) % 128 / 32]),
        of_warps_(control.partials[local]),
        to_(a.sums.partials + (head * a.plan.chunks + blockIdx.x) * kLastRows) {}

  __device__ void add(const float (&scores)[kScores], float factor, int) {
    sums_.add(scores, factor);
  }

  __device__ void end() {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    sums_.store(of_warps_[thread / 32]);
    named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);
    if (thread < kLastRows) {
      to_[thread] = merged(merged(of_warps_[0][thread], of_warps_[1][thread]),
                           merged(of_warps_[2][thread], of_warps_[3][thread]));
    }
  }

 private:
  SoftmaxSums sums_;
  float2 (&of_warps_)[kRanges][kLastRows];
  float2* to_;
};

// The second kernel.
class SumsOfHead {
 public:
  static constexpr bool kNeedsKeys = true;

  __device__ SumsOfHead(const Arguments& a, const Task& task, Control& control, std::int64_t head,
                        int local)
      : sums_(control.log_sums[local]), kv_len_(task.geometry.kv_len) {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    combine_partials(a, task, a.sums.partials + head * a.plan.chunks * kLastRows,
                     control.log_sums[local]);
    columns_ = a.sums.columns + head * a.plan.stride + place();
    diagonals_ = a.sums.diagonals + head * a.plan.stride + place();
    tails_ = a.sums.tails + ((head * a.plan.chunks + blockIdx.x) * kRanges + warp) * kLastRows;
  }

  __device__ void add(const float (&scores)[kScores], float factor, int first_key) {
    float column;
    float diagonal;
    sums_.add(scores, factor, column, diagonal);
    if (writes() && first_key + place() < kv_len_) {
      columns_[first_key] = column;
      diagonals_[first_key] = diagonal;
    }
  }

  __device__ void end() {
    for (int n = 0; n < kLastRows; n += kStepKeys) {
      const float diagonal = sums_.advance();
      if (writes()) tails_[n + place()] = diagonal;
    }
  }

 private:
  // Of the lane's results among the 16 of a step.
  __device__ static int place() { return lane() / 4 + lane() % 4 * 8; }
  __device__ static bool writes() { return lane() % 4 < 2; }

  SlashSums sums_;
  int kv_len_;
  float* columns_;
  float* diagonals_;
  float* tails_;
};

// Executed by a warpgroup for the block's head `local`.
template <class T, int kPanels, class OfHead>
__device__ void consume(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t queries, std::uint32_t full, std::uint32_t empty,
                        Control& control, int local) {
  const std::int64_t head =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.y) / a.plan.head_groups) *
          a.problem.group +
      task.first_in_group + local;
  OfHead sums(a, task, control, head, local);
  named_barrier(1 + local, 128);
  const Scorer scorer(a, task);
  const int range_begin = task.first_key + static_cast<int>(threadIdx.x) % 128 / 32 * a.plan.range;
  int stage = 0;
  std::uint32_t parity = 0;
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(full + stage * 8, parity);
    float scores[kScores];
    start_products<T, kPanels>(tiles + stage * kPanels * kPanelBytes, queries, scores);
    finish_products(scores);
    if (lane() == 0) arrive_at(empty + stage * 8);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    const int first_key = range_begin + step * kStepKeys;
    scorer.apply(first_key, scores);
    sums.add(scores, scorer.factor(), first_key);
  }
  sums.end();
}

template <class T, int kPanels, class OfHead>
__global__ void __launch_bounds__(kMaxThreads, 1)
    last_q_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  __shared__ Control control;
  // Not in registers, which are short.
  __shared__ Task task;
  if (threadIdx.x == 0) task = task_of_block(a);
  __syncthreads();
  if (task.active == 0 || (OfHead::kNeedsKeys && task.steps == 0)) return;
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
  load_queries<kPanels>(a, task, queries);
  __syncthreads();
  const int local = static_cast<int>(threadIdx.x) / 128;
  if (local == a.plan.heads) {
    produce<kPanels>(a, task, tiles, full, empty);
  } else if ((task.active >> local & 1) != 0) {
    consume<T, kPanels, OfHead>(a, task, tiles, queries + local * kTileBytes, full, empty, control,
                                local);
  }
}

template <class T, int kPanels>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  const int bytes = arguments.plan.shared_bytes;
  const int threads = 128 * arguments.plan.heads + 32 * kProducerWarps;
  const auto start = [&](auto* kernel) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    kernel<<<grid, threads, bytes, stream>>>(arguments);
    check(cudaGetLastError(), "starting the last-q estimate");
  };
  start(last_q_kernel<T, kPanels, StatsOfHead>);
  start(last_q_kernel<T, kPanels, SumsOfHead>);
}

template <class T>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  switch (arguments.plan.panels) {
    case 1:
      return launch<T, 1>(arguments, grid, stream);
    case 2:
      return launch<T, 2>(arguments, grid, stream);
    default:
      return launch<T, 4>(arguments, grid, stream);
  }
}

}  // namespace

void estimate_last_q(const Problem& problem, const LastQPlan& plan, const std::uint8_t* wanted,
                     int first, int count, const LastQSums& sums, cudaStream_t stream) {
  Arguments arguments{problem, plan,  sums,
                      wanted,  first, is_aligned(problem.q) && is_aligned(problem.k)};
  const dim3 grid(plan.chunks, count * plan.head_groups);
  if (problem.q.dtype == DType::kBF16) {
    launch<__nv_bfloat16>(arguments, grid, stream);
  } else {
    launch<__half>(arguments, grid, stream);
  }
}

}  // namespace minference::cuda

#include "index/cuda/pooled_scores.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

constexpr int kMeanThreads = 128;

struct Arguments {
  Problem problem;
  PooledScores plan;
  HeadFilter filter;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
  int rows = 0;
  Chunks chunks = Chunks::kParts;
};

// Adds a chunk of a row to `sum`.
template <class T>
__device__ void add_chunk(const char* from, Chunks chunks, float (&sum)[kChunkDims]) {
  T elements[kChunkDims];
  if (sizeof(T) == 2 && chunks == Chunks::kWhole) {
    *reinterpret_cast<uint4*>(elements) = *reinterpret_cast<const uint4*>(from);
  } else {
#pragma unroll
    for (int d = 0; d < kChunkDims; ++d) elements[d] = reinterpret_cast<const T*>(from)[d];
  }
#pragma unroll
  for (int d = 0; d < kChunkDims; ++d) sum[d] += static_cast<float>(elements[d]);
}

// A block of threads a block of tokens.
template <class T, bool kKeys>
__global__ void __launch_bounds__(kMeanThreads) mean_kernel(const __grid_constant__ Arguments a) {
  __shared__ float sums[kMeanThreads * kChunkDims];
  const Problem& problem = a.problem;
  const Means& means = kKeys ? a.plan.keys : a.plan.queries;
  const int heads = kKeys ? problem.kv_heads : problem.q_heads;
  const int local = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
  const int of_batch = kKeys ? local : a.first_head + local;
  if (!kKeys && !a.filter.wants(of_batch, heads)) return;
  const int b = of_batch / heads;
  const int head = of_batch % heads;
  const Geometry geometry = sequence_geometry(problem, b);
  const int first = static_cast<int>(blockIdx.x) * a.plan.block_size;
  const int count =
      max(min((kKeys ? geometry.kv_len : geometry.q_len) - first, a.plan.block_size), 0);
  const int chunks = problem.dim / kChunkDims;
  const int rows = kMeanThreads / chunks;  // side by side
  const int row = static_cast<int>(threadIdx.x) / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks;
  float sum[kChunkDims] = {};
  for (int i = row; row < rows && i < count; i += rows) {
    const char* from =
        (kKeys ? key_row(problem, b, head, first + i) : query_row(problem, b, head, first + i)) +
        chunk * kChunkDims * static_cast<int>(sizeof(T));
    add_chunk<T>(from, a.chunks, sum);
  }
#pragma unroll
  for (int d = 0; d < kChunkDims; ++d) sums[threadIdx.x * kChunkDims + d] = sum[d];
  __syncthreads();
  const std::int64_t to =
      (static_cast<std::int64_t>(local) * means.blocks + blockIdx.x) * problem.dim;
  for (int d = static_cast<int>(threadIdx.x); d < problem.dim; d += kMeanThreads) {
    float total = 0.0F;
    for (int r = 0; r < rows; ++r) total += sums[r * problem.dim + d];
    const float mean = count > 0 ? total / static_cast<float>(count) : 0.0F;
    const __nv_bfloat16 high = __float2bfloat16(mean);
    means.high[to + d] = high;
    means.low[to + d] = __float2bfloat16(mean - __bfloat162float(high));
  }
}

// Executed by the one warpgroup of a block: fetches 64 means from `first` on, both halves.
template <int kPanels>
__device__ void load_means(const Means& means, std::int64_t row, int first, int dim,
                           std::uint32_t high, std::uint32_t low) {
  const int chunk = static_cast<int>(threadIdx.x) % kChunkDims;
  for (int i = static_cast<int>(threadIdx.x) / kChunkDims; i < kTileTokens; i += 128 / kChunkDims) {
    const bool exists = first + i < means.blocks;
    const std::int64_t at = (row * means.blocks + (exists ? first + i : 0)) * dim;
    load_row_chunks<kPanels>(high, i, chunk, reinterpret_cast<const char*>(means.high + at), exists,
                             dim, Chunks::kWhole);
    load_row_chunks<kPanels>(low, i, chunk, reinterpret_cast<const char*>(means.low + at), exists,
                             dim, Chunks::kWhole);
  }
}

// Tiles of key blocks that a thread block works on.
constexpr int kTilesOfBlock = 4;

// A block 64 row blocks of a head against some of the key blocks that they see.
template <int kPanels>
__global__ void __launch_bounds__(128) scores_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  const Problem& problem = a.problem;
  const int i = static_cast<int>(blockIdx.y);
  const int b = (a.first_head + i) / problem.q_heads;
  const int h = (a.first_head + i) % problem.q_heads;
  if (!a.filter.wants(a.first_head + i, problem.q_heads)) return;
  const DeviceGrid grid(sequence_geometry(problem, b), a.plan.block_size);
  const int local = static_cast<int>(blockIdx.x) * kTileTokens;  // row block in the scores
  const int m = a.first_row + local;
  if (m >= grid.row_blocks()) return;
  const int begin = static_cast<int>(blockIdx.z) * kTilesOfBlock * kTileTokens;
  const int end = min(grid.visible(min(m + kTileTokens, grid.row_blocks()) - 1).end,
                      begin + kTilesOfBlock * kTileTokens);
  if (begin >= end) return;
  constexpr int kTileBytes = kPanels * kPanelBytes;
  const std::uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023U;
  const std::uint32_t keys = queries + 2 * kTileBytes;
  load_means<kPanels>(a.plan.queries, i, m, problem.dim, queries, queries + kTileBytes);
  const auto load_keys = [&](int n, int stage) {
    const std::uint32_t to = keys + stage * 2 * kTileBytes;
    load_means<kPanels>(a.plan.keys,
                        static_cast<std::int64_t>(b) * problem.kv_heads + h / problem.group, n,
                        problem.dim, to, to + kTileBytes);
  };
  load_keys(begin, 0);
  cp_async_commit();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* rows =
      a.plan.scores + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.stride;
  int stage = 0;
  for (int n = begin; n < end; n += kTileTokens, stage ^= 1) {
    if (n + kTileTokens < end) load_keys(n + kTileTokens, stage ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    fence_for_products();
    __syncthreads();
    float scores[kScores];
    const std::uint32_t high = keys + stage * 2 * kTileBytes;
    const std::uint32_t low = high + kTileBytes;
    start_products<__nv_bfloat16, kPanels>(high, queries, scores);
    start_products<__nv_bfloat16, kPanels, true>(high, queries + kTileBytes, scores);
    start_products<__nv_bfloat16, kPanels, true>(low, queries, scores);
    start_products<__nv_bfloat16, kPanels, true>(low, queries + kTileBytes, scores);
    finish_products(scores);
#pragma unroll
    for (int s = 0; s < kScores; ++s) {
      const int key = n + warp * 16 + s / 2 % 2 * 8 + lane / 4;
      const int row = s / 4 * 8 + lane % 4 * 2 + s % 2;
      float score = scores[s] * problem.scale;
      if (problem.soft_cap > 0) score = problem.soft_cap * tanhf(score / problem.soft_cap);
      if (key < end && local + row < a.plan.rows) {
        rows[static_cast<std::int64_t>(row) * a.plan.stride + key] = score;
      }
    }
    __syncthreads();
  }
}

template <bool kKeys>
void pool(const Arguments& a, dim3 grid, cudaStream_t stream) {
  if (a.problem.q.dtype == DType::kBF16) {
    mean_kernel<__nv_bfloat16, kKeys><<<grid, kMeanThreads, 0, stream>>>(a);
  } else if (a.problem.q.dtype == DType::kF16) {
    mean_kernel<__half, kKeys><<<grid, kMeanThreads, 0, stream>>>(a);
  } else {
    mean_kernel<float, kKeys><<<grid, kMeanThreads, 0, stream>>>(a);
  }
  check(cudaGetLastError(), "pooling queries or keys");
}

template <int kPanels>
void start_scores(const Arguments& a, int heads, cudaStream_t stream) {
  constexpr int kBytes = 1024 + 6 * kPanels * kPanelBytes;  // a tile of queries, two of keys
  allow_shared_memory(reinterpret_cast<const void*>(scores_kernel<kPanels>), kBytes);
  scores_kernel<kPanels>
      <<<dim3((a.rows + kTileTokens - 1) / kTileTokens, heads,
              (a.plan.stride + kTilesOfBlock * kTileTokens - 1) / (kTilesOfBlock * kTileTokens)),
         128, kBytes, stream>>>(a);
}

}  // namespace

PooledScores plan_pooled_scores(const Problem& problem, int block_size, std::int64_t bytes,
                                MemoryPieces& workspace) {
  PooledScores plan;
  plan.block_size = block_size;
  plan.row_blocks = (problem.q_tokens + block_size - 1) / block_size;
  const std::int64_t tiles = (plan.row_blocks + kTileTokens - 1) / kTileTokens;
  const int key_blocks = (problem.kv_tokens + block_size - 1) / block_size;
  plan.stride = (key_blocks + 31) / 32 * 32;
  const std::int64_t tile_bytes =
      static_cast<std::int64_t>(kTileTokens) * plan.stride * sizeof(float);
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  plan.rows =
      static_cast<int>(std::clamp<std::int64_t>(bytes / tile_bytes, 1, tiles)) * kTileTokens;
  plan.heads = static_cast<int>(std::clamp<std::int64_t>(
      bytes / (plan.rows / kTileTokens * tile_bytes), 1, std::min<std::int64_t>(heads, 1024)));
  const auto means = [&](std::int64_t count, int blocks) {
    const std::int64_t size = count * blocks * problem.dim;
    return Means{workspace.take<__nv_bfloat16>(size), workspace.take<__nv_bfloat16>(size), blocks};
  };
  plan.queries = means(plan.heads, plan.row_blocks);
  plan.keys = means(static_cast<std::int64_t>(problem.batch) * problem.kv_heads, key_blocks);
  plan.scores =
      workspace.take<float>(static_cast<std::int64_t>(plan.heads) * plan.rows * plan.stride);
  return plan;
}

void pool_keys(const Problem& problem, const PooledScores& plan, cudaStream_t stream) {
  pool<true>({problem, plan, {}, 0, 0, 0, chunks_of(problem.k, problem.k)},
             dim3(plan.keys.blocks, problem.kv_heads, problem.batch), stream);
}

void pool_queries(const Problem& problem, const PooledScores& plan, const HeadFilter& filter,
                  int first, int count, cudaStream_t stream) {
  pool<false>({problem, plan, filter, first, 0, 0, chunks_of(problem.q, problem.q)},
              dim3(plan.queries.blocks, count), stream);
}

void score_means(const Problem& problem, const PooledScores& plan, const HeadFilter& filter,
                 int first, int count, int first_row, int rows, cudaStream_t stream) {
  const Arguments a{problem, plan, filter, first, first_row, rows};
  if (problem.dim <= kPanelDims) {
    start_scores<1>(a, count, stream);
  } else if (problem.dim <= 2 * kPanelDims) {
    start_scores<2>(a, count, stream);
  } else {
    start_scores<4>(a, count, stream);
  }
  check(cudaGetLastError(), "scoring means of blocks");
}

}  // namespace minference::cuda

#include "index/cuda/pooled.h"

#include <algorithm>
#include <cmath>

#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/score_tile.cuh"
#include "index/cuda/top_k.cuh"

namespace minference::cuda {
namespace {

constexpr int kMeanThreads = 128;
constexpr int kRowsOfBlock = 8;  // a warp each

struct Arguments {
  Problem problem;
  IndexArrays arrays;
  PooledPlan plan;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
  int top_k = 0;
  bool aligned = false;
};

__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }

// A block of threads a block of tokens.
template <class T, bool kKeys>
__global__ void __launch_bounds__(kMeanThreads) mean_kernel(const __grid_constant__ Arguments a) {
  __shared__ float sums[kMeanThreads * kChunkDims];
  const Problem& problem = a.problem;
  const Means& means = kKeys ? a.plan.keys : a.plan.queries;
  const int head = static_cast<int>(blockIdx.y);
  const int b = static_cast<int>(blockIdx.z);
  const Geometry geometry = sequence_geometry(problem, b);
  const int first = static_cast<int>(blockIdx.x) * a.plan.kept.block_size;
  const int count =
      max(min((kKeys ? geometry.kv_len : geometry.q_len) - first, a.plan.kept.block_size), 0);
  const int chunks = problem.dim / kChunkDims;
  const int rows = kMeanThreads / chunks;  // side by side
  const int row = static_cast<int>(threadIdx.x) / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks;
  float sum[kChunkDims] = {};
  for (int i = row; row < rows && i < count; i += rows) {
    const char* from =
        (kKeys ? key_row(problem, b, head, first + i) : query_row(problem, b, head, first + i)) +
        chunk * kChunkDims * 2;
    std::uint32_t words[4];
    if (a.aligned) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      words[0] = all.x;
      words[1] = all.y;
      words[2] = all.z;
      words[3] = all.w;
    } else {
      read_chunk(from, true, words);
    }
    const T* elements = reinterpret_cast<const T*>(words);
#pragma unroll
    for (int d = 0; d < kChunkDims; ++d) sum[d] += to_float(elements[d]);
  }
#pragma unroll
  for (int d = 0; d < kChunkDims; ++d) sums[threadIdx.x * kChunkDims + d] = sum[d];
  __syncthreads();
  const std::int64_t to =
      ((static_cast<std::int64_t>(b) * means.heads + head) * means.blocks + blockIdx.x) *
      problem.dim;
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
                             dim, true);
    load_row_chunks<kPanels>(low, i, chunk, reinterpret_cast<const char*>(means.low + at), exists,
                             dim, true);
  }
}

// Tiles of key blocks that a thread block works on.
constexpr int kTilesOfBlock = 8;

// A block 64 row blocks of a head against some of the key blocks that they see.
template <int kPanels>
__global__ void __launch_bounds__(128) scores_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  const Problem& problem = a.problem;
  const int i = static_cast<int>(blockIdx.y);
  const int b = (a.first_head + i) / problem.q_heads;
  const int h = (a.first_head + i) % problem.q_heads;
  if (a.arrays.plans[h].kind != HeadPattern::Kind::kBlockSparse) return;
  const DeviceGrid grid(sequence_geometry(problem, b), a.plan.kept.block_size);
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
  load_means<kPanels>(a.plan.queries, static_cast<std::int64_t>(b) * problem.q_heads + h, m,
                      problem.dim, queries, queries + kTileBytes);
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

// Executed by a warp: the threshold of the k highest ranks among n, k from 1 to their number, and how
// many of those equal to it are wanted. rank(i) is 0 for what does not take part.
template <class Rank>
__device__ void find_threshold(Rank&& rank, int begin, int end, int k, std::uint32_t* counts,
                               std::uint32_t& threshold, int& ties) {
  constexpr int kBins = 256;
  constexpr int kBits = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  threshold = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    for (int i = lane; i < kBins; i += 32) counts[i] = 0;
    __syncwarp();
    const std::uint32_t known = shift == 32 - kBits ? 0 : ~0U << (shift + kBits);
    constexpr int kAtATime = 8;  // loads in flight
    for (int first = begin + lane; first < end; first += 32 * kAtATime) {
      std::uint32_t ranks[kAtATime];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        ranks[i] = first + 32 * i < end ? rank(first + 32 * i) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        if (first + 32 * i < end && (ranks[i] & known) == threshold) {
          atomicAdd(&counts[ranks[i] >> shift & (kBins - 1)], 1);
        }
      }
    }
    __syncwarp();
    // Lane l has the bins from 255 - 8 * l downwards.
    const int top = kBins - 1 - lane * (kBins / 32);
    int sum = 0;
    for (int i = 0; i < kBins / 32; ++i) sum += static_cast<int>(counts[top - i]);
    int until = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0U, until, distance);
      if (lane >= distance) until += other;
    }
    int before = until - sum;
    int bin = top;
    const bool here = before < k && k <= until;
    for (; here && before + static_cast<int>(counts[bin]) < k; --bin) {
      before += static_cast<int>(counts[bin]);
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0U, here))) - 1;
    threshold |= static_cast<std::uint32_t>(__shfl_sync(~0U, bin, owner)) << shift;
    k -= __shfl_sync(~0U, before, owner);
    __syncwarp();
  }
  ties = k;
}

// A warp a row block.
__global__ void __launch_bounds__(32 * kRowsOfBlock)
    select_kernel(const __grid_constant__ Arguments a) {
  __shared__ std::uint32_t counts[kRowsOfBlock][256];
  const int i = static_cast<int>(blockIdx.y);
  const int b = (a.first_head + i) / a.problem.q_heads;
  const int h = (a.first_head + i) % a.problem.q_heads;
  if (a.arrays.plans[h].kind != HeadPattern::Kind::kBlockSparse) return;
  const DeviceGrid grid(sequence_geometry(a.problem, b), a.plan.kept.block_size);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int local = static_cast<int>(blockIdx.x) * kRowsOfBlock + warp;
  const int m = a.first_row + local;
  if (local >= a.plan.rows || m >= grid.row_blocks()) return;
  const DeviceGrid::Range seen = grid.visible(m);
  const DeviceGrid::Range own = grid.diagonal(m);
  const auto forced = [&](int n) { return n == 0 || own.contains(n); };
  const int forced_count = own.size() + (seen.contains(0) && !own.contains(0) ? 1 : 0);
  const float* scores =
      a.plan.scores + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.stride;
  const int others = seen.size() - forced_count;
  const int wanted = min(max(a.top_k - forced_count, 0), others);
  // Rank 0 is that of NaN and of what does not take part: it may count as a tie only if all others do.
  const auto rank = [&](int n) { return forced(n) ? 0U : max(rank_of(scores[n]), 1U); };
  std::uint32_t threshold = ~0U;
  int ties = 0;
  if (wanted == others) {
    threshold = 0;
  } else if (wanted > 0) {
    find_threshold(rank, seen.begin, seen.end, wanted, counts[warp], threshold, ties);
  }
  std::uint32_t* bits =
      a.plan.kept.bits + (static_cast<std::int64_t>(i) * a.plan.kept.rows + m) * a.plan.kept.words;
  for (int first = seen.begin / 32 * 32; first < seen.end; first += 32) {
    const int n = first + lane;
    const bool exists = seen.contains(n);
    const std::uint32_t r = exists ? rank(n) : 0;
    const std::uint32_t equal = __ballot_sync(~0U, exists && r == threshold);
    const bool is_tie = exists && r == threshold && __popc(equal & ((1U << lane) - 1)) < ties;
    const std::uint32_t word = __ballot_sync(~0U, exists && (forced(n) || r > threshold || is_tie));
    ties -= min(__popc(equal), ties);
    if (lane == 0) bits[first / 32] = word;
  }
}

template <class T>
void pool(const Arguments& a, cudaStream_t stream) {
  const Problem& problem = a.problem;
  mean_kernel<T, true>
      <<<dim3(a.plan.keys.blocks, problem.kv_heads, problem.batch), kMeanThreads, 0, stream>>>(a);
  mean_kernel<T, false>
      <<<dim3(a.plan.queries.blocks, problem.q_heads, problem.batch), kMeanThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "pooling queries and keys");
}

template <int kPanels>
void start_scores(const Arguments& a, int rows, int heads, cudaStream_t stream) {
  constexpr int kBytes = 1024 + 6 * kPanels * kPanelBytes;  // a tile of queries, two of keys
  allow_shared_memory(reinterpret_cast<const void*>(scores_kernel<kPanels>), kBytes);
  scores_kernel<kPanels>
      <<<dim3((rows + kTileTokens - 1) / kTileTokens, heads,
              (a.plan.stride + kTilesOfBlock * kTileTokens - 1) / (kTilesOfBlock * kTileTokens)),
         128, kBytes, stream>>>(a);
}

}  // namespace

PooledPlan plan_pooled(const Problem& problem, int block_size, MemoryPieces& workspace) {
  constexpr std::int64_t kScoreBytes = std::int64_t{48} << 20;
  PooledPlan plan;
  plan.kept = plan_kept_blocks(problem, block_size);
  const std::int64_t tiles = (plan.kept.rows + kTileTokens - 1) / kTileTokens;
  plan.stride = plan.kept.words * 32;
  const std::int64_t tile_bytes =
      static_cast<std::int64_t>(kTileTokens) * plan.stride * sizeof(float);
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  plan.rows =
      static_cast<int>(std::clamp<std::int64_t>(kScoreBytes / tile_bytes, 1, tiles)) * kTileTokens;
  plan.heads = static_cast<int>(
      std::clamp<std::int64_t>(kScoreBytes / (plan.rows / kTileTokens * tile_bytes), 1,
                               std::min<std::int64_t>(heads, 1024)));
  const auto means = [&](int count, int blocks) {
    const std::int64_t size =
        static_cast<std::int64_t>(problem.batch) * count * blocks * problem.dim;
    return Means{workspace.take<__nv_bfloat16>(size), workspace.take<__nv_bfloat16>(size), count,
                 blocks};
  };
  plan.queries = means(problem.q_heads, plan.kept.rows);
  plan.keys = means(problem.kv_heads, (problem.kv_tokens + block_size - 1) / block_size);
  plan.scores =
      workspace.take<float>(static_cast<std::int64_t>(plan.heads) * plan.rows * plan.stride);
  plan.kept.bits = workspace.take<std::uint32_t>(static_cast<std::int64_t>(plan.heads) *
                                                 plan.kept.rows * plan.kept.words);
  return plan;
}

void build_pooled_heads(const Problem& problem, const IndexArrays& arrays, const PooledPlan& plan,
                        int top_k, cudaStream_t stream) {
  Arguments a{problem, arrays, plan, 0, 0, top_k, is_aligned(problem.q) && is_aligned(problem.k)};
  if (problem.q.dtype == DType::kBF16) {
    pool<__nv_bfloat16>(a, stream);
  } else {
    pool<__half>(a, stream);
  }
  const int heads = problem.batch * problem.q_heads;
  for (int first = 0; first < heads; first += plan.heads) {
    const int count = std::min(plan.heads, heads - first);
    a.first_head = first;
    for (int row = 0; row < plan.kept.rows; row += plan.rows) {
      const int rows = std::min(plan.rows, plan.kept.rows - row);
      a.first_row = row;
      if (problem.dim <= kPanelDims) {
        start_scores<1>(a, rows, count, stream);
      } else if (problem.dim <= 2 * kPanelDims) {
        start_scores<2>(a, rows, count, stream);
      } else {
        start_scores<4>(a, rows, count, stream);
      }
      select_kernel<<<dim3((rows + kRowsOfBlock - 1) / kRowsOfBlock, count), 32 * kRowsOfBlock, 0,
                      stream>>>(a);
      check(cudaGetLastError(), "selecting key blocks");
    }
    write_block_heads(problem, arrays, plan.kept, first, count, stream);
  }
}

}  // namespace minference::cuda

#include "index/cuda/flexprefill.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/cover.cuh"
#include "index/cuda/score_tile.cuh"
#include "index/cuda/warp_sums.cuh"

namespace minference::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostDim = 256;

struct Arguments {
  Problem problem;
  FlexPrefillPlan plan;
  BlockBits bits;
  double gamma = 0;
  float tau = 0;
  int min_blocks = 0;
  int max_blocks = 0;
};

// Short texts are dense.
__device__ bool is_sparse(const Arguments& a, const Geometry& geometry) {
  return geometry.q_len > 0 &&
         geometry.kv_len > static_cast<std::int64_t>(max(a.min_blocks, 2)) * a.bits.block_size;
}

// The sum over a thread block, in every thread.
__device__ float block_total(float value, float (&shared)[kWarps]) {
  value = warp_total(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0F;
  for (const float part : shared) total += part;
  return total;
}

__device__ float block_maximum(float value, float (&shared)[kWarps]) {
  value = warp_maximum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float highest = -kInfinity;
  for (const float part : shared) highest = fmaxf(highest, part);
  return highest;
}

// Scores of the mean of the last rows, in shared memory, with the mean keys of blocks [begin, end).
__device__ void score_mean(const Arguments& a, const float* mean, std::int64_t kv_head, int begin,
                           int end, float* scores) {
  const Means& keys = a.plan.map.scores.keys;
  const Problem& problem = a.problem;
  for (int n = begin + static_cast<int>(threadIdx.x) / 32; n < end; n += kWarps) {
    const std::int64_t at = (kv_head * keys.blocks + n) * problem.dim;
    float score = 0.0F;
    for (int d = static_cast<int>(threadIdx.x) % 32; d < problem.dim; d += 32) {
      score += mean[d] * (__bfloat162float(keys.high[at + d]) + __bfloat162float(keys.low[at + d]));
    }
    score = warp_total(score) * problem.scale;
    if (problem.soft_cap > 0) score = problem.soft_cap * tanhf(score / problem.soft_cap);
    if (threadIdx.x % 32 == 0) scores[n] = score;
  }
}

template <class T>
__device__ void mean_of_rows(const Problem& problem, int b, int h, int first, int end,
                             float* mean) {
  for (int d = static_cast<int>(threadIdx.x); d < problem.dim; d += kThreads) {
    float sum = 0.0F;
#pragma unroll 8
    for (int row = first; row < end; ++row) {
      sum += static_cast<float>(reinterpret_cast<const T*>(query_row(problem, b, h, row))[d]);
    }
    mean[d] = sum / static_cast<float>(end - first);
  }
}

__device__ float divergence_term(float x, float mean) {
  return x > 0.0F ? x * logf(x / mean) : 0.0F;
}

// A thread block a head: whether the pooled scores of the last queries tell where their attention goes.
__global__ void __launch_bounds__(kThreads) test_kernel(const __grid_constant__ Arguments a) {
  __shared__ float mean[kMostDim];
  __shared__ float shared[kWarps];
  const Problem& problem = a.problem;
  const int head = static_cast<int>(blockIdx.x);
  const int b = head / problem.q_heads;
  const int h = head % problem.q_heads;
  const DeviceGrid grid(sequence_geometry(problem, b), a.bits.block_size);
  const Geometry& geometry = grid.geometry();
  if (threadIdx.x == 0) a.plan.query_aware[head] = 0;
  if (!is_sparse(a, geometry)) return;
  const int first = max(geometry.q_len - a.bits.block_size, 0);
  if (problem.q.dtype == DType::kBF16) {
    mean_of_rows<__nv_bfloat16>(problem, b, h, first, geometry.q_len, mean);
  } else if (problem.q.dtype == DType::kF16) {
    mean_of_rows<__half>(problem, b, h, first, geometry.q_len, mean);
  } else {
    mean_of_rows<float>(problem, b, h, first, geometry.q_len, mean);
  }
  __syncthreads();
  const DeviceGrid::Range seen = grid.visible_from(first, geometry.q_len);
  const int key_blocks = a.plan.masses.key_blocks;
  float* scores = a.plan.pooled + static_cast<std::int64_t>(head) * key_blocks;
  score_mean(a, mean, static_cast<std::int64_t>(b) * problem.kv_heads + h / problem.group,
             seen.begin, seen.end, scores);
  __syncthreads();
  const std::uint32_t* columns =
      a.plan.masses.columns + static_cast<std::int64_t>(head) * key_blocks;
  float highest = -kInfinity;
  float actual_total = 0.0F;
  const int thread = static_cast<int>(threadIdx.x);
  for (int n = thread; n < grid.key_blocks(); n += kThreads) {
    if (seen.contains(n)) highest = fmaxf(highest, scores[n]);
    actual_total += static_cast<float>(columns[n]);
  }
  highest = block_maximum(highest, shared);
  actual_total = block_total(actual_total, shared);
  float total = 0.0F;
  for (int n = seen.begin + thread; n < seen.end; n += kThreads) {
    total += exp2_fast((scores[n] - highest) * kLog2E);
  }
  total = block_total(total, shared);
  float sum = 0.0F;
  for (int n = thread; n < grid.key_blocks(); n += kThreads) {
    const float estimated =
        seen.contains(n) ? exp2_fast((scores[n] - highest) * kLog2E) / total : 0.0F;
    const float actual = static_cast<float>(columns[n]) / actual_total;
    const float middle = (estimated + actual) / 2;
    sum += divergence_term(estimated, middle) + divergence_term(actual, middle);
  }
  sum = block_total(sum, shared);
  // NaN is not near.
  if (thread == 0) a.plan.query_aware[head] = sqrtf(fmaxf(sum / 2, 0.0F)) < a.tau && sum == sum;
}

// Executed by a warp: entry 0 and the heaviest others that hold gamma of the sum, but at least and at most
// so many, as bits.
__device__ void write_cover(const std::uint32_t* masses, int count, double gamma, int at_least,
                            int at_most, std::uint32_t* bits) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto weight = [&](int n) { return masses[n]; };
  std::uint32_t total = 0;
  for_each_weight(weight, 0, count, [&](std::uint32_t w) { total += w; });
  total = warp_sum(total);
  const auto goal = static_cast<std::uint32_t>(ceil(gamma * total));
  const WeightsInMemory others(weight, 1, count);
  Cover cover = find_cover(others, goal > masses[0] ? goal - masses[0] : 0);
  std::uint32_t above = 0;
  others.for_each([&](std::uint32_t w) { above += w > cover.weight ? 1 : 0; });
  const int kept = 1 + static_cast<int>(warp_sum(above)) + cover.ties;
  if (kept < at_least || kept > at_most) {
    cover = find_heaviest(others, count - 1, (kept < at_least ? at_least : at_most) - 1);
  }
  for (int first = 0; first < count; first += 32) {
    const int n = first + lane;
    const bool other = n > 0 && n < count;
    const std::uint32_t w = other ? masses[n] : 0;
    const std::uint32_t equal = __ballot_sync(~0U, other && w == cover.weight);
    const bool is_tie = (equal >> lane & 1) != 0 && __popc(equal & ((1U << lane) - 1)) < cover.ties;
    cover.ties -= min(__popc(equal), cover.ties);
    const bool keeps = n == 0 || is_tie || (other && w > cover.weight);
    const std::uint32_t word = __ballot_sync(~0U, keeps);
    if (lane == 0) bits[first / 32] = word;
  }
}

// A thread block of two warps a head: its columns and its diagonals.
__global__ void __launch_bounds__(64) cover_kernel(const __grid_constant__ Arguments a) {
  const int head = static_cast<int>(blockIdx.x);
  const DeviceGrid grid(sequence_geometry(a.problem, head / a.problem.q_heads), a.bits.block_size);
  if (!is_sparse(a, grid.geometry())) return;
  const std::int64_t at = static_cast<std::int64_t>(head) * a.plan.masses.key_blocks;
  // Columns and diagonals of query-aware heads shrink to the smallest budget.
  const int most = a.plan.query_aware[head] != 0 ? a.min_blocks : a.max_blocks;
  const bool columns = threadIdx.x < 32;
  write_cover((columns ? a.plan.masses.columns : a.plan.masses.diagonals) + at, grid.key_blocks(),
              a.gamma, a.min_blocks, most,
              (columns ? a.plan.columns : a.plan.diagonals) +
                  static_cast<std::int64_t>(head) * a.bits.words);
}

// Rounds down, below 0 too.
__device__ int block_of(int position, int size) {
  return position >= 0 ? position / size : -((size - 1 - position) / size);
}

// A warp a row block: all that it keeps. The bits hold the map already where there is one.
__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ Arguments a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y);
  const DeviceGrid grid(sequence_geometry(a.problem, head / a.problem.q_heads), a.bits.block_size);
  const int m = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (m >= grid.row_blocks() || !is_sparse(a, grid.geometry())) return;
  const std::int64_t at = static_cast<std::int64_t>(head) * a.bits.words;
  const std::uint32_t* columns = a.plan.columns + at;
  const std::uint32_t* diagonals = a.plan.diagonals + at;
  const DeviceGrid::Range seen = grid.visible(m);
  const DeviceGrid::Range own = grid.diagonal(m);
  // The blocks of the row block's first and last position.
  const int low = block_of(grid.geometry().position(grid.first_row(m)), a.bits.block_size);
  const int high = block_of(grid.geometry().position(grid.end_row(m) - 1), a.bits.block_size);
  const auto on_diagonal = [&](int s) {
    return s >= 0 && s < grid.key_blocks() && (diagonals[s / 32] >> (s % 32) & 1) != 0;
  };
  const bool has_map = a.plan.query_aware[head] != 0;
  std::uint32_t* bits = a.bits.row(head, m);
  bool everything = true;
  for (int word = seen.begin / 32; word * 32 < seen.end; ++word) {
    const int n = word * 32 + lane;
    const bool exists = seen.contains(n);
    const bool forced = n == 0 || own.contains(n);
    const bool keeps = exists && (forced || on_diagonal(low - n) || on_diagonal(high - n));
    std::uint32_t kept = __ballot_sync(~0U, keeps);
    const std::uint32_t all = __ballot_sync(~0U, exists);
    kept |= columns[word] & all;
    if (has_map) kept |= bits[word] & all;
    everything = everything && kept == all;
    __syncwarp();
    if (lane == 0) bits[word] = kept;
  }
  if (lane == 0 && !everything) a.bits.leaves_out[head] = 1;
}

}  // namespace

FlexPrefillPlan plan_flexprefill(const Problem& problem, const FlexPrefillRule& rule,
                                 MemoryPieces& workspace) {
  constexpr std::int64_t kPartBytes = std::int64_t{32} << 20;
  const int block_size = static_cast<int>(rule.block_size);
  FlexPrefillPlan plan;
  plan.masses = allocate_block_masses(problem, block_size, workspace);
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  const std::int64_t words = (plan.masses.key_blocks + 31) / 32;
  plan.pooled = workspace.take<float>(heads * plan.masses.key_blocks);
  plan.query_aware = workspace.take<int>(heads);
  plan.columns = workspace.take<std::uint32_t>(heads * words);
  plan.diagonals = workspace.take<std::uint32_t>(heads * words);
  // The estimate is over before the map begins.
  const auto lay_out = [&](void* memory) {
    MemoryPieces of_estimate(memory);
    MemoryPieces of_map(memory);
    plan.estimate = plan_last_rows_masses(problem, block_size, kPartBytes, of_estimate);
    plan.map = plan_pooled_map(problem, block_size, kPartBytes, of_map);
    return std::max(of_estimate.used(), of_map.used());
  };
  lay_out(workspace.take<char>(lay_out(nullptr)));
  return plan;
}

void build_flexprefill_heads(const Problem& problem, const FlexPrefillPlan& plan,
                             const FlexPrefillRule& rule, const BlockBits& bits,
                             cudaStream_t stream) {
  const auto narrow = [](std::int64_t blocks) {
    return static_cast<int>(std::min<std::int64_t>(blocks, INT32_MAX / 2));
  };
  const Arguments a{problem,
                    plan,
                    bits,
                    rule.gamma,
                    static_cast<float>(rule.tau),
                    narrow(rule.min_blocks),
                    narrow(rule.max_blocks)};
  const int heads = problem.batch * problem.q_heads;
  begin_block_bits(problem, bits, stream);
  estimate_last_rows(problem, plan.estimate, bits.block_size, plan.masses, stream);
  pool_keys(problem, plan.map.scores, stream);
  test_kernel<<<heads, kThreads, 0, stream>>>(a);
  cover_kernel<<<heads, 64, 0, stream>>>(a);
  check(cudaGetLastError(), "choosing columns and diagonals of blocks");
  write_pooled_map(problem, plan.map, plan.query_aware, rule.gamma, bits, stream);
  keep_kernel<<<dim3((bits.rows + kWarps - 1) / kWarps, heads), kThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "writing what heads keep");
  finish_block_bits(problem, bits, stream);
}

}  // namespace minference::cuda

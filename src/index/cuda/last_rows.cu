#include "index/cuda/last_rows.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "index/cuda/cover.cuh"
#include "index/cuda/warp_sums.cuh"

namespace minference::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Arguments {
  Problem problem;
  LastRowsPlan plan;
  int block_size = 0;
  BlockMasses masses;
  int first_head = 0;  // over the whole batch
};

__device__ Geometry geometry_of_block(const Arguments& a) {
  return sequence_geometry(a.problem,
                           (a.first_head + static_cast<int>(blockIdx.y)) / a.problem.q_heads);
}

__device__ float2* shares_of_row(const Arguments& a, int r) {
  return a.plan.shares +
         (static_cast<std::int64_t>(blockIdx.y) * a.block_size + r) * a.masses.key_blocks;
}

// A warp a row.
__global__ void __launch_bounds__(kThreads) shares_kernel(const __grid_constant__ Arguments a) {
  const CellScores& scores = a.plan.scores;
  const int r = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const Geometry geometry = geometry_of_block(a);
  const int row = first_cell(scores, geometry, 0) + r;
  if (r >= a.block_size || row >= geometry.q_len) return;
  const CellRange seen(geometry, 1, row, row);
  const int begin = seen.begin / scores.slot;
  const int end = (seen.end + scores.slot - 1) / scores.slot;
  const float* sums =
      scores.sums + (static_cast<std::int64_t>(blockIdx.y) * scores.rows + r) * scores.row_sums();
  const float log = log_of_sums(sums, 2 * begin, 2 * end);
  const auto* pairs = reinterpret_cast<const float2*>(sums);
  float2* shares = shares_of_row(a, r);
  const int block_slots = a.block_size / scores.slot;
  for (int n = static_cast<int>(threadIdx.x) % 32; n < a.masses.key_blocks; n += 32) {
    float2 share{0.0F, 0.0F};
    const int last = min((n + 1) * block_slots, end);
    for (int slot = max(n * block_slots, begin); slot < last; ++slot) {
      const float2 pair = pairs[slot];
      share.x += exp2_fast(pair.x - log);
      share.y += exp2_fast(pair.y - log);
    }
    shares[n] = share;
  }
}

// A thread a key block and a block of offsets of the same number.
__global__ void __launch_bounds__(kThreads) masses_kernel(const __grid_constant__ Arguments a) {
  const int n = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (n >= a.masses.key_blocks) return;
  const Geometry geometry = geometry_of_block(a);
  const int first = first_cell(a.plan.scores, geometry, 0);
  const int rows = geometry.q_len - first;
  const int key_blocks = (geometry.kv_len + a.block_size - 1) / a.block_size;
  float column = 0.0F;
  float diagonal = 0.0F;
#pragma unroll 4
  for (int r = 0; r < rows; ++r) {
    const float2* shares = shares_of_row(a, r);
    column += shares[n].x + shares[n].y;
    const int position = geometry.position(first + r);
    if (position < 0) continue;
    // Of key block f the farther keys are offsets of block own - f, the nearer of the one before it.
    const int far = position / a.block_size - n;
    if (far >= 0 && far < key_blocks) diagonal += shares[far].x;
    if (far - 1 >= 0 && far - 1 < key_blocks) diagonal += shares[far - 1].y;
  }
  const float weight = rows > 0 ? static_cast<float>(kWholeWeight / rows) : 0.0F;
  const std::int64_t at =
      static_cast<std::int64_t>(a.first_head + static_cast<int>(blockIdx.y)) * a.masses.key_blocks +
      n;
  a.masses.columns[at] = __float2uint_rn(column * weight);
  a.masses.diagonals[at] = __float2uint_rn(diagonal * weight);
}

}  // namespace

BlockMasses allocate_block_masses(const Problem& problem, int block_size, MemoryPieces& workspace) {
  BlockMasses masses;
  masses.key_blocks = (problem.kv_tokens + block_size - 1) / block_size;
  const std::int64_t size =
      static_cast<std::int64_t>(problem.batch) * problem.q_heads * masses.key_blocks;
  masses.columns = workspace.take<std::uint32_t>(size);
  masses.diagonals = workspace.take<std::uint32_t>(size);
  return masses;
}

LastRowsPlan plan_last_rows_masses(const Problem& problem, int block_size, std::int64_t bytes,
                                   MemoryPieces& workspace) {
  LastRowsPlan plan;
  plan.scores = plan_last_rows(problem, block_size, bytes, workspace);
  const std::int64_t key_blocks = (problem.kv_tokens + block_size - 1) / block_size;
  plan.shares = workspace.take<float2>(static_cast<std::int64_t>(plan.scores.heads) * block_size *
                                       key_blocks);
  return plan;
}

void estimate_last_rows(const Problem& problem, const LastRowsPlan& plan, int block_size,
                        const BlockMasses& masses, cudaStream_t stream) {
  Arguments a{problem, plan, block_size, masses};
  const int heads = problem.batch * problem.q_heads;
  for (a.first_head = 0; a.first_head < heads; a.first_head += plan.scores.heads) {
    const int count = std::min(plan.scores.heads, heads - a.first_head);
    score_cells(problem, plan.scores, a.first_head, count, 0, block_size, stream);
    shares_kernel<<<dim3((block_size + kWarps - 1) / kWarps, count), kThreads, 0, stream>>>(a);
    masses_kernel<<<dim3((masses.key_blocks + kThreads - 1) / kThreads, count), kThreads, 0,
                    stream>>>(a);
    check(cudaGetLastError(), "estimating by the last rows");
  }
}

}  // namespace minference::cuda

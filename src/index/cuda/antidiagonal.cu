#include "index/cuda/antidiagonal.h"

#include <algorithm>
#include <cmath>

#include "attention/cuda/check.h"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/cover.cuh"
#include "index/cuda/warp_sums.cuh"

namespace minference::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSelectWarps = 4;
constexpr int kMostCells = 1024;  // along a block

struct Arguments {
  Problem problem;
  AntidiagonalPlan plan;
  BlockBits bits;
  double threshold = 0;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
};

// A thread block a row block: turns the sums of its rows of cells into its mass by key block.
__global__ void __launch_bounds__(kThreads) mass_kernel(const __grid_constant__ Arguments a) {
  struct Row {
    float log;
    int begin;  // slots that the row sees
    int end;
  };
  __shared__ Row rows[kMostCells];
  const CellScores& cells = a.plan.cells;
  const int i = static_cast<int>(blockIdx.y);
  const int local = static_cast<int>(blockIdx.x);
  const DeviceGrid grid(sequence_geometry(a.problem, (a.first_head + i) / a.problem.q_heads),
                        a.bits.block_size);
  const int m = a.first_row + local;
  if (m >= grid.row_blocks()) return;
  const Geometry& geometry = grid.geometry();
  const int first = m * a.plan.block_cells;
  const int count = min(a.plan.block_cells, cells.cells(geometry.q_len) - first);
  const float* sums =
      cells.sums +
      (static_cast<std::int64_t>(i) * cells.rows + local * a.plan.block_cells) * cells.slots;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < count; r += kWarps) {
    const CellRange seen(geometry, cells.stride, first + r, first + r);
    const int begin = seen.begin / cells.slot;
    const int end = (seen.end + cells.slot - 1) / cells.slot;
    const float log = log_of_sums(sums + static_cast<std::int64_t>(r) * cells.slots, begin, end);
    if (threadIdx.x % 32 == 0) rows[r] = {log, begin, end};
  }
  __syncthreads();
  std::uint32_t* mass =
      a.plan.mass + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.key_blocks;
  const int block_slots = a.plan.block_cells / cells.slot;
  const float weight = static_cast<float>(kWholeWeight / count);
  const DeviceGrid::Range seen = grid.visible(m);
  for (int n = seen.begin + static_cast<int>(threadIdx.x); n < seen.end; n += kThreads) {
    float sum = 0.0F;
#pragma unroll 8
    for (int r = 0; r < count; ++r) {
      const float* of_row = sums + static_cast<std::int64_t>(r) * cells.slots;
      const int begin = max(n * block_slots, rows[r].begin);
      const int end = min((n + 1) * block_slots, rows[r].end);
      for (int slot = begin; slot < end; ++slot) sum += exp2_fast(of_row[slot] - rows[r].log);
    }
    mass[n] = __float2uint_rn(sum * weight);
  }
}

// A warp a row block.
__global__ void __launch_bounds__(32 * kSelectWarps)
    select_kernel(const __grid_constant__ Arguments a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int i = static_cast<int>(blockIdx.y);
  const int head = a.first_head + i;
  const DeviceGrid grid(sequence_geometry(a.problem, head / a.problem.q_heads), a.bits.block_size);
  const int local =
      static_cast<int>(blockIdx.x) * kSelectWarps + static_cast<int>(threadIdx.x) / 32;
  const int m = a.first_row + local;
  if (local >= a.plan.rows || m >= grid.row_blocks()) return;
  const DeviceGrid::Range seen = grid.visible(m);
  const DeviceGrid::Range own = grid.diagonal(m);
  const auto forced = [&](int n) { return n == 0 || own.contains(n); };
  const std::uint32_t* mass =
      a.plan.mass + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.key_blocks;
  std::uint32_t total = 0;
  for_each_weight([&](int n) { return mass[n]; }, seen.begin, seen.end,
                  [&](std::uint32_t w) { total += w; });
  total = warp_sum(total);
  std::uint32_t held = 0;
  if (lane == 0 && seen.contains(0) && !own.contains(0)) held = mass[0];
  for (int n = own.begin + lane; n < own.end; n += 32) held += mass[n];
  held = warp_sum(held);
  const auto goal = static_cast<std::uint32_t>(ceil(a.threshold * total));
  const auto weight = [&](int n) { return forced(n) ? 0U : mass[n]; };
  const std::uint32_t wanted = goal > held ? goal - held : 0;
  const int begin = seen.begin;
  const int end = seen.end;
  Cover cover;
  if (end - begin <= 32 * 8) {
    cover = find_cover(WeightsInRegisters<8>(weight, begin, end), wanted);
  } else if (end - begin <= 32 * 32) {
    cover = find_cover(WeightsInRegisters<32>(weight, begin, end), wanted);
  } else {
    cover = find_cover(WeightsInMemory(weight, begin, end), wanted);
  }
  bool everything = true;
  std::uint32_t* bits = a.bits.row(head, m);
  for (int first = seen.begin / 32 * 32; first < seen.end; first += 32) {
    const int n = first + lane;
    const bool exists = seen.contains(n);
    const std::uint32_t w = exists ? weight(n) : 0;
    const std::uint32_t equal = __ballot_sync(~0U, exists && !forced(n) && w == cover.weight);
    const bool is_tie = (equal >> lane & 1) != 0 && __popc(equal & ((1U << lane) - 1)) < cover.ties;
    const bool keeps = exists && (forced(n) || w > cover.weight || is_tie);
    cover.ties -= min(__popc(equal), cover.ties);
    const std::uint32_t word = __ballot_sync(~0U, keeps);
    everything = everything && word == __ballot_sync(~0U, exists);
    if (lane == 0) bits[first / 32] = word;
  }
  if (lane == 0 && !everything) a.bits.leaves_out[head] = 1;
}

}  // namespace

AntidiagonalPlan plan_antidiagonals(const Problem& problem, int block_size, int stride, float norm,
                                    MemoryPieces& workspace) {
  constexpr std::int64_t kSumBytes = std::int64_t{48} << 20;
  AntidiagonalPlan plan;
  plan.block_cells = block_size / stride;
  plan.cells = plan_cell_scores(problem, stride, plan.block_cells, norm, kSumBytes, workspace);
  plan.rows = plan.cells.rows / plan.block_cells;
  plan.key_blocks = (problem.kv_tokens + block_size - 1) / block_size;
  plan.mass = workspace.take<std::uint32_t>(static_cast<std::int64_t>(plan.cells.heads) *
                                            plan.rows * plan.key_blocks);
  return plan;
}

void build_antidiagonal_heads(const Problem& problem, const AntidiagonalPlan& plan,
                              double threshold, const BlockBits& bits, cudaStream_t stream) {
  Arguments a{problem, plan, bits, threshold};
  const int heads = problem.batch * problem.q_heads;
  begin_block_bits(problem, bits, stream);
  for (a.first_head = 0; a.first_head < heads; a.first_head += plan.cells.heads) {
    const int count = std::min(plan.cells.heads, heads - a.first_head);
    for (a.first_row = 0; a.first_row < bits.rows; a.first_row += plan.rows) {
      const int rows = std::min(plan.rows, bits.rows - a.first_row);
      score_cells(problem, plan.cells, a.first_head, count, a.first_row * plan.block_cells,
                  rows * plan.block_cells, stream);
      mass_kernel<<<dim3(rows, count), kThreads, 0, stream>>>(a);
      select_kernel<<<dim3((rows + kSelectWarps - 1) / kSelectWarps, count), 32 * kSelectWarps, 0,
                      stream>>>(a);
      check(cudaGetLastError(), "selecting key blocks by their mass");
    }
  }
  finish_block_bits(problem, bits, stream);
}

}  // namespace minference::cuda

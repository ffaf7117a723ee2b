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

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostCells = 1024;   // along a block
constexpr int kNearBlocks = 4096;  // key blocks whose mass lies in shared memory

struct Arguments {
  Problem problem;
  AntidiagonalPlan plan;
  BlockBits bits;
  double threshold = 0;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
};

// A row of cells: its sum, as a logarithm, and the slots that it sees.
struct Row {
  float log;
  int begin;
  int end;
};

// Sums over a thread block, in every thread. Two of them may follow each other without a barrier.
class BlockSums {
 public:
  struct Shared {
    std::uint32_t of_warps[2][kWarps];
  };

  __device__ explicit BlockSums(Shared& shared) : shared_(shared) {}

  __device__ std::uint32_t sum(std::uint32_t of_thread) {
    std::uint32_t* of_warps = shared_.of_warps[turn_];
    turn_ ^= 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const std::uint32_t of_warp = warp_sum(of_thread);
    if (lane == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return warp_sum(lane < kWarps ? of_warps[lane] : 0);
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// The weights that a thread block chooses from.
template <class Weight>
class WeightsOfBlock {
 public:
  __device__ WeightsOfBlock(const Weight& weight, int begin, int end, BlockSums& sums)
      : weight_(weight), begin_(begin), end_(end), sums_(sums) {}

  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    for (int n = begin_ + static_cast<int>(threadIdx.x); n < end_; n += kThreads) visit(weight_(n));
  }
  __device__ std::uint32_t sum(std::uint32_t of_thread) const { return sums_.sum(of_thread); }

 private:
  const Weight& weight_;
  int begin_;
  int end_;
  BlockSums& sums_;
};

// Executed by a thread block: turns the sums of the rows of cells of row block m, from the first one's
// on, into its mass by key block.
__device__ void sum_mass(const Arguments& a, const DeviceGrid& grid, int m, const float* sums,
                         Row* rows, std::uint32_t* mass) {
  const CellScores& cells = a.plan.cells;
  const Geometry& geometry = grid.geometry();
  const int first = m * a.plan.block_cells;
  const int count = min(a.plan.block_cells, cells.cells(geometry.q_len) - first);
  for (int r = static_cast<int>(threadIdx.x) / 32; r < count; r += kWarps) {
    const CellRange seen(geometry, cells.stride, first + r, first + r);
    const int begin = seen.begin / cells.slot;
    const int end = (seen.end + cells.slot - 1) / cells.slot;
    const float log = log_of_sums(sums + static_cast<std::int64_t>(r) * cells.slots, begin, end);
    if (threadIdx.x % 32 == 0) rows[r] = {log, begin, end};
  }
  __syncthreads();
  const int block_slots = a.plan.block_cells / cells.slot;
  const float weight = static_cast<float>(kWholeWeight / count);
  const DeviceGrid::Range seen = grid.visible(m);
  for (int n = seen.begin + static_cast<int>(threadIdx.x); n < seen.end; n += kThreads) {
    float sum = 0.0F;
    if (block_slots == 1) {  // without a loop in the loop, loads go together
#pragma unroll 16
      for (int r = 0; r < count; ++r) {
        const bool sees = n >= rows[r].begin && n < rows[r].end;
        const float of_slot =
            sees ? sums[static_cast<std::int64_t>(r) * cells.slots + n] : -kInfinity;
        sum += exp2_fast(of_slot - rows[r].log);
      }
      mass[n] = __float2uint_rn(sum * weight);
      continue;
    }
    for (int r = 0; r < count; ++r) {
      const float* of_row = sums + static_cast<std::int64_t>(r) * cells.slots;
      const int begin = max(n * block_slots, rows[r].begin);
      const int end = min((n + 1) * block_slots, rows[r].end);
      for (int slot = begin; slot < end; ++slot) sum += exp2_fast(of_row[slot] - rows[r].log);
    }
    mass[n] = __float2uint_rn(sum * weight);
  }
}

// Executed by a thread block: the bits of row block m of a head.
__device__ void select_blocks(const Arguments& a, const DeviceGrid& grid, int head, int m,
                              const std::uint32_t* mass, BlockSums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const DeviceGrid::Range seen = grid.visible(m);
  const DeviceGrid::Range own = grid.diagonal(m);
  const auto forced = [&](int n) { return n == 0 || own.contains(n); };
  std::uint32_t total = 0;
  std::uint32_t held = 0;
  for (int n = seen.begin + static_cast<int>(threadIdx.x); n < seen.end; n += kThreads) {
    total += mass[n];
    if (forced(n)) held += mass[n];
  }
  total = sums.sum(total);
  held = sums.sum(held);
  const auto goal = static_cast<std::uint32_t>(ceil(a.threshold * total));
  const auto weight = [&](int n) { return forced(n) ? 0U : mass[n]; };
  const std::uint32_t wanted = goal > held ? goal - held : 0;
  Cover cover = find_cover(WeightsOfBlock(weight, seen.begin, seen.end, sums), wanted);
  if (threadIdx.x >= 32) return;
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

// A thread block a row block.
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ Arguments a) {
  __shared__ Row rows[kMostCells];
  __shared__ std::uint32_t near_mass[kNearBlocks];
  __shared__ BlockSums::Shared shared;
  const int i = static_cast<int>(blockIdx.y);
  const int local = static_cast<int>(blockIdx.x);
  const int head = a.first_head + i;
  const DeviceGrid grid(sequence_geometry(a.problem, head / a.problem.q_heads), a.bits.block_size);
  const int m = a.first_row + local;
  if (m >= grid.row_blocks()) return;
  const float* sums = a.plan.cells.sums + (static_cast<std::int64_t>(i) * a.plan.cells.rows +
                                           local * a.plan.block_cells) *
                                              a.plan.cells.slots;
  std::uint32_t* mass = near_mass;
  if (a.plan.mass != nullptr) {
    mass = a.plan.mass + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.key_blocks;
  }
  sum_mass(a, grid, m, sums, rows, mass);
  __syncthreads();
  BlockSums block_sums(shared);
  select_blocks(a, grid, head, m, mass, block_sums);
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
  if (plan.key_blocks > kNearBlocks) {
    plan.mass = workspace.take<std::uint32_t>(static_cast<std::int64_t>(plan.cells.heads) *
                                              plan.rows * plan.key_blocks);
  }
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
      select_kernel<<<dim3(rows, count), kThreads, 0, stream>>>(a);
      check(cudaGetLastError(), "selecting key blocks by their mass");
    }
  }
  finish_block_bits(problem, bits, stream);
}

}  // namespace minference::cuda

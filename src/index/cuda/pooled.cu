#include "index/cuda/pooled.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/top_k.cuh"

namespace minference::cuda {
namespace {

constexpr int kRowsOfBlock = 4;  // a warp each

struct Arguments {
  Problem problem;
  IndexArrays arrays;
  PooledScores plan;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
  int top_k = 0;
};

// What is known of a row block before any score is.
struct Row {
  DeviceGrid::Range seen;
  DeviceGrid::Range own;
  int forced_count;
  int wanted;  // beside those

  __device__ Row(const DeviceGrid& grid, int m, int top_k)
      : seen(grid.visible(m)), own(grid.diagonal(m)) {
    forced_count = own.size() + (seen.contains(0) && !own.contains(0) ? 1 : 0);
    wanted = min(max(top_k - forced_count, 0), others());
  }

  __device__ int others() const { return seen.size() - forced_count; }
  __device__ int count() const { return forced_count + wanted; }
  __device__ bool forced(int n) const { return n == 0 || own.contains(n); }
};

__device__ DeviceGrid grid_of(const Arguments& a, int b) {
  return {sequence_geometry(a.problem, b), a.plan.block_size};
}

// A block a head: where its row blocks begin in its list, and what kind of head it is.
__global__ void __launch_bounds__(kSelectThreads) rows_kernel(const __grid_constant__ Arguments a) {
  __shared__ BlockScan::Shared shared;
  const int b = static_cast<int>(blockIdx.x) / a.problem.q_heads;
  const int h = static_cast<int>(blockIdx.x) % a.problem.q_heads;
  const HeadPlan& plan = a.arrays.plans[h];
  if (plan.kind != HeadPattern::Kind::kBlockSparse) return;
  const DeviceGrid grid = grid_of(a, b);
  DeviceHead result;
  result.block_row_begin = b * a.arrays.block_rows_of_sequence + plan.block_row_begin;
  result.block_id_begin = b * a.arrays.block_ids_of_sequence + plan.block_id_begin;
  std::int32_t* block_rows = a.arrays.block_rows + result.block_row_begin;
  BlockScan scan(shared);
  std::int64_t total = 0;
  bool everything = true;
  for (int base = 0; base < a.plan.row_blocks; base += kSelectThreads) {
    const int m = base + static_cast<int>(threadIdx.x);
    int count = 0;
    if (m < grid.row_blocks()) {
      const Row row(grid, m, a.top_k);
      count = row.count();
      everything = everything && count == row.seen.size();
    }
    everything = __syncthreads_and(everything) != 0;
    int of_all;
    const int before = scan.exclusive(count, of_all);
    // Sums that do not fit are of no use: such a head becomes dense.
    if (m < a.plan.row_blocks) {
      block_rows[m + 1] = static_cast<std::int32_t>(total + before + count);
    }
    total += of_all;
  }
  if (threadIdx.x != 0) return;
  block_rows[0] = 0;
  result.kind =
      everything || total > plan.block_ids ? HeadIndex::Kind::kDense : HeadIndex::Kind::kBlock;
  a.arrays.heads[blockIdx.x] = result;
}

// The ranks of the key blocks that a warp chooses from, 32 at a time: block begin + 32 * i + lane. Rank 0
// is that of what does not take part.
template <int kMost>
struct RanksInRegisters {
  std::uint32_t ranks[kMost];

  template <class Rank>
  __device__ RanksInRegisters(Rank&& rank, int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int n = begin + 32 * i + lane;
      ranks[i] = n < end ? rank(n) : 0;
    }
  }

  __device__ int count_from(std::uint32_t least) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) count += ranks[i] >= least ? 1 : 0;
    return count;
  }

  template <class Visit>
  __device__ void for_each(int begin, int end, Visit&& visit) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (begin + 32 * i < end) visit(begin + 32 * i, ranks[i]);
    }
  }
};

// The same for any number.
template <class Rank>
struct RanksInMemory {
  const Rank& rank;
  int begin;
  int end;

  __device__ int count_from(std::uint32_t least) const {
    int count = 0;
#pragma unroll 8
    for (int n = begin + static_cast<int>(threadIdx.x) % 32; n < end; n += 32) {
      count += rank(n) >= least ? 1 : 0;
    }
    return count;
  }

  template <class Visit>
  __device__ void for_each(int, int, Visit&& visit) const {
    for (int first = begin; first < end; first += 32) {
      const int n = first + static_cast<int>(threadIdx.x) % 32;
      visit(first, n < end ? rank(n) : 0);
    }
  }
};

// Executed by a warp: writes the row block's key blocks, ascending.
template <class Ranks>
__device__ void select(const Row& row, int begin, const Ranks& ranks, std::int32_t* ids) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The highest rank that so many reach.
  std::uint32_t threshold = 0;
  int above = 0;
  if (row.wanted == 0) {
    threshold = ~0U;
  } else if (row.wanted < row.others()) {
    for (int bit = 31; bit >= 0; --bit) {
      const std::uint32_t candidate = threshold | 1U << bit;
      const int count = __reduce_add_sync(~0U, ranks.count_from(candidate));
      if (count >= row.wanted) {
        threshold = candidate;
      } else {
        above = count;
      }
    }
  }
  int ties = row.wanted - above;  // that are wanted, the first of them
  int written = 0;
  ranks.for_each(begin, row.seen.end, [&](int first, std::uint32_t rank) {
    const int n = first + lane;
    const bool forced = row.seen.contains(n) && row.forced(n);
    const std::uint32_t before = (1U << lane) - 1;
    const std::uint32_t equal = __ballot_sync(~0U, rank != 0 && rank == threshold);
    const bool is_tie = (equal >> lane & 1) != 0 && __popc(equal & before) < ties;
    ties -= min(__popc(equal), ties);
    // Threshold 0 stands for all.
    const bool keeps = forced || is_tie || (rank != 0 && rank > threshold);
    const std::uint32_t kept = __ballot_sync(~0U, keeps);
    if (keeps) ids[written + __popc(kept & before)] = n;
    written += __popc(kept);
  });
}

// A warp a row block.
__global__ void __launch_bounds__(32 * kRowsOfBlock)
    select_kernel(const __grid_constant__ Arguments a) {
  const int i = static_cast<int>(blockIdx.y);
  const int b = (a.first_head + i) / a.problem.q_heads;
  const int h = (a.first_head + i) % a.problem.q_heads;
  if (a.arrays.plans[h].kind != HeadPattern::Kind::kBlockSparse) return;
  const DeviceHead& head = a.arrays.heads[a.first_head + i];
  if (head.kind != HeadIndex::Kind::kBlock) return;
  const DeviceGrid grid = grid_of(a, b);
  const int local =
      static_cast<int>(blockIdx.x) * kRowsOfBlock + static_cast<int>(threadIdx.x) / 32;
  const int m = a.first_row + local;
  if (local >= a.plan.rows || m >= grid.row_blocks()) return;
  const Row row(grid, m, a.top_k);
  const float* scores =
      a.plan.scores + (static_cast<std::int64_t>(i) * a.plan.rows + local) * a.plan.stride;
  // NaN may count as a tie only if all others do.
  const auto rank = [&](int n) {
    return row.seen.contains(n) && !row.forced(n) ? max(rank_of(scores[n]), 1U) : 0U;
  };
  std::int32_t* ids =
      a.arrays.block_ids + head.block_id_begin + a.arrays.block_rows[head.block_row_begin + m];
  const int begin = row.seen.begin;
  const int end = row.seen.end;
  if (end - begin <= 32 * 16) {
    select(row, begin, RanksInRegisters<16>(rank, begin, end), ids);
  } else if (end - begin <= 32 * 32) {
    select(row, begin, RanksInRegisters<32>(rank, begin, end), ids);
  } else if (end - begin <= 32 * 64) {
    select(row, begin, RanksInRegisters<64>(rank, begin, end), ids);
  } else {
    select(row, begin, RanksInMemory<decltype(rank)>{rank, begin, end}, ids);
  }
}

}  // namespace

PooledPlan plan_pooled(const Problem& problem, MemoryPieces& workspace) {
  constexpr std::int64_t kScoreBytes = std::int64_t{32} << 20;
  return plan_pooled_scores(problem, static_cast<int>(kKeyBlock), kScoreBytes, workspace);
}

void build_pooled_heads(const Problem& problem, const IndexArrays& arrays, const PooledPlan& plan,
                        int top_k, cudaStream_t stream) {
  Arguments a{problem, arrays, plan, 0, 0, top_k};
  const HeadFilter filter{arrays.plans, nullptr};
  const int heads = problem.batch * problem.q_heads;
  rows_kernel<<<heads, kSelectThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "laying out key blocks");
  pool_keys(problem, plan, stream);
  for (a.first_head = 0; a.first_head < heads; a.first_head += plan.heads) {
    const int count = std::min(plan.heads, heads - a.first_head);
    pool_queries(problem, plan, filter, a.first_head, count, stream);
    for (a.first_row = 0; a.first_row < plan.row_blocks; a.first_row += plan.rows) {
      const int rows = std::min(plan.rows, plan.row_blocks - a.first_row);
      score_means(problem, plan, filter, a.first_head, count, a.first_row, rows, stream);
      select_kernel<<<dim3((rows + kRowsOfBlock - 1) / kRowsOfBlock, count), 32 * kRowsOfBlock, 0,
                      stream>>>(a);
      check(cudaGetLastError(), "selecting key blocks");
    }
  }
}

}  // namespace minference::cuda

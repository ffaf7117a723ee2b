#include "index/cuda/block_rows.h"

#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/top_k.cuh"

namespace minference::cuda {
namespace {

constexpr int kRowsOfBlock = 8;  // a warp each
constexpr int kThreads = 32 * kRowsOfBlock;

struct Arguments {
  Problem problem;
  IndexArrays arrays;
  KeptBlocks kept;
  int first = 0;
};

struct Head {
  int b;
  int h;
  const HeadPlan* plan;
};

__device__ Head head_of(const Arguments& a, int i) {
  const int b = (a.first + i) / a.problem.q_heads;
  const int h = (a.first + i) % a.problem.q_heads;
  return {b, h, a.arrays.plans + h};
}

__device__ std::int32_t* rows_of(const Arguments& a, const Head& head) {
  return a.arrays.block_rows + head.b * a.arrays.block_rows_of_sequence +
         head.plan->block_row_begin;
}

// Executed by a warp: visits the index's key blocks that the row block keeps, 32 at a time:
// visit(first of them, bits, number of bits before). Returns how many there are.
template <class Visit>
__device__ int for_each_kept(const KeptBlocks& kept, const std::uint32_t* bits,
                             DeviceGrid::Range seen, Visit&& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int ratio = kept.block_size / static_cast<int>(kKeyBlock);
  int count = 0;
  for (int first = seen.begin / 32 * 32; first < seen.end; first += 32) {
    const int n = first + lane;
    const int block = n / ratio;
    const bool keeps = seen.contains(n) && (bits[block / 32] >> (block % 32) & 1) != 0;
    const std::uint32_t word = __ballot_sync(~0U, keeps);
    visit(first, word, count);
    count += __popc(word);
  }
  return count;
}

// kWrite false: counts what each row block keeps, into entry m + 1. True: writes the ids.
template <bool kWrite>
__global__ void __launch_bounds__(kThreads) block_rows_kernel(const __grid_constant__ Arguments a) {
  const int i = static_cast<int>(blockIdx.y);
  const Head head = head_of(a, i);
  if (head.plan->kind != HeadPattern::Kind::kBlockSparse) return;
  const int m = static_cast<int>(blockIdx.x) * kRowsOfBlock + static_cast<int>(threadIdx.x) / 32;
  const int rows = (a.problem.q_tokens + static_cast<int>(kRowBlock) - 1) / kRowBlock;
  if (m >= rows) return;
  const DeviceGrid grid(sequence_geometry(a.problem, head.b), kRowBlock);
  const bool exists = m < grid.row_blocks();
  const int row = m / (a.kept.block_size / static_cast<int>(kRowBlock));
  const std::uint32_t* bits =
      a.kept.bits + (static_cast<std::int64_t>(i) * a.kept.rows + row) * a.kept.words;
  const DeviceGrid::Range seen = exists ? grid.visible(m) : DeviceGrid::Range{};
  std::int32_t* block_rows = rows_of(a, head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kWrite) {
    if (a.arrays.heads[head.b * a.problem.q_heads + head.h].kind != HeadIndex::Kind::kBlock) return;
    std::int32_t* ids = a.arrays.block_ids + head.b * a.arrays.block_ids_of_sequence +
                        head.plan->block_id_begin + block_rows[m];
    for_each_kept(a.kept, bits, seen, [&](int first, std::uint32_t word, int before) {
      if ((word >> lane & 1) != 0) ids[before + __popc(word & ((1U << lane) - 1))] = first + lane;
    });
  } else {
    const int count = for_each_kept(a.kept, bits, seen, [](int, std::uint32_t, int) {});
    if (lane == 0) block_rows[m + 1] = count;
  }
}

// A block a head: sums the counts up and decides on the head.
__global__ void __launch_bounds__(kSelectThreads)
    finish_heads(const __grid_constant__ Arguments a) {
  __shared__ BlockScan::Shared shared;
  const Head head = head_of(a, static_cast<int>(blockIdx.x));
  if (head.plan->kind != HeadPattern::Kind::kBlockSparse) return;
  const int rows = (a.problem.q_tokens + static_cast<int>(kRowBlock) - 1) / kRowBlock;
  const DeviceGrid grid(sequence_geometry(a.problem, head.b), kRowBlock);
  std::int32_t* block_rows = rows_of(a, head);
  BlockScan scan(shared);
  std::int64_t total = 0;
  bool everything = true;
  for (int base = 0; base < rows; base += kSelectThreads) {
    const int m = base + static_cast<int>(threadIdx.x);
    const int count = m < rows ? block_rows[m + 1] : 0;
    const int seen = m < grid.row_blocks() ? grid.visible(m).size() : 0;
    everything = __syncthreads_and(everything && count == seen) != 0;
    int of_all;
    const int before = scan.exclusive(count, of_all);
    // Sums that do not fit are of no use: such a head becomes dense.
    if (m < rows) block_rows[m + 1] = static_cast<std::int32_t>(total + before + count);
    total += of_all;
  }
  if (threadIdx.x != 0) return;
  block_rows[0] = 0;
  DeviceHead result;
  if (!everything && total <= head.plan->block_ids) {
    result.kind = HeadIndex::Kind::kBlock;
    result.block_row_begin = head.b * a.arrays.block_rows_of_sequence + head.plan->block_row_begin;
    result.block_id_begin = head.b * a.arrays.block_ids_of_sequence + head.plan->block_id_begin;
  }
  a.arrays.heads[head.b * a.problem.q_heads + head.h] = result;
}

}  // namespace

KeptBlocks plan_kept_blocks(const Problem& problem, int block_size) {
  KeptBlocks kept;
  kept.block_size = block_size;
  kept.rows = (problem.q_tokens + block_size - 1) / block_size;
  kept.words = ((problem.kv_tokens + block_size - 1) / block_size + 31) / 32;
  return kept;
}

void write_block_heads(const Problem& problem, const IndexArrays& arrays, const KeptBlocks& kept,
                       int first, int count, cudaStream_t stream) {
  const Arguments a{problem, arrays, kept, first};
  const int rows = (problem.q_tokens + static_cast<int>(kRowBlock) - 1) / kRowBlock;
  const dim3 grid((rows + kRowsOfBlock - 1) / kRowsOfBlock, count);
  block_rows_kernel<false><<<grid, kThreads, 0, stream>>>(a);
  finish_heads<<<count, kSelectThreads, 0, stream>>>(a);
  block_rows_kernel<true><<<grid, kThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "writing block rows");
}

}  // namespace minference::cuda

#include "index/cuda/pooled_map.h"

#include <algorithm>

#include "attention/cuda/check.h"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/warp_scan.cuh"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/cover.cuh"

namespace minference::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = MapCut::kBins;

struct Arguments {
  Problem problem;
  PooledMap plan;
  const int* flags = nullptr;
  BlockBits bits;
  double share = 0;
  int first_head = 0;  // over the whole batch
  int first_row = 0;   // row block
  int blocks = 0;      // thread blocks of a head and pass, over all of its parts
};

// Bits of a digit: 11, 11 and 10 of 32.
__device__ constexpr int shift_of(int pass) { return pass == 0 ? 21 : (pass == 1 ? 10 : 0); }

// A row block of a head that takes part.
struct Row {
  bool exists = false;
  int m = 0;
  DeviceGrid::Range seen;
  std::uint32_t* weights = nullptr;  // the scores' place
};

__device__ bool wants(const Arguments& a) {
  return a.flags[a.first_head + static_cast<int>(blockIdx.y)] != 0;
}

// Of a warp.
__device__ Row row_of_warp(const Arguments& a) {
  const int i = static_cast<int>(blockIdx.y);
  const DeviceGrid grid(sequence_geometry(a.problem, (a.first_head + i) / a.problem.q_heads),
                        a.plan.scores.block_size);
  const int local = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  Row row;
  row.m = a.first_row + local;
  row.exists = local < a.plan.scores.rows && row.m < grid.row_blocks();
  if (!row.exists) return row;
  row.seen = grid.visible(row.m);
  row.weights = reinterpret_cast<std::uint32_t*>(a.plan.scores.scores) +
                (static_cast<std::int64_t>(i) * a.plan.scores.rows + local) * a.plan.scores.stride;
  return row;
}

// Turns the scores of a row block into weights, in their place.
__global__ void __launch_bounds__(kThreads) softmax_kernel(const __grid_constant__ Arguments a) {
  if (!wants(a)) return;
  const Row row = row_of_warp(a);
  if (!row.exists) return;
  const float* scores = reinterpret_cast<const float*>(row.weights);
  const int first = row.seen.begin + static_cast<int>(threadIdx.x) % 32;
  float highest = -kInfinity;
  for (int n = first; n < row.seen.end; n += 32) highest = fmaxf(highest, scores[n]);
  highest = warp_maximum(highest);
  float total = 0.0F;
  for (int n = first; n < row.seen.end; n += 32) {
    total += exp2_fast((scores[n] - highest) * kLog2E);
  }
  total = warp_total(total);
  for (int n = first; n < row.seen.end; n += 32) {
    const float p = exp2_fast((scores[n] - highest) * kLog2E) / total;
    row.weights[n] = __float2uint_rn(p * static_cast<float>(kWholeWeight));
  }
}

// Executed by a warp, for the sums of a pass: the digit where the heaviest weights reach what is wanted.
__device__ void find_digit(const Arguments& a, int pass, MapCut& cut) {
  constexpr int kOfLane = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned long long* sums = cut.sums[pass];
  // Lane 0 has the heaviest.
  const int top = kBins - 1 - lane * kOfLane;
  unsigned long long sum = 0;
  for (int i = 0; i < kOfLane; ++i) sum += __ldcg(&sums[top - i]);
  const unsigned long long until = sum_to_lane(sum);
  const unsigned long long total = __shfl_sync(~0U, until, 31);
  const unsigned long long wanted =
      pass == 0 ? static_cast<unsigned long long>(ceil(a.share * static_cast<double>(total)))
                : cut.wanted;
  __syncwarp();
  if (wanted == 0) {
    if (lane == 0) cut.weight = ~0U;
    return;
  }
  unsigned long long before = until - sum;
  if (before >= wanted || wanted > until) return;
  int bin = top;
  for (;; --bin) {
    const unsigned long long here = __ldcg(&sums[bin]);
    if (before + here >= wanted) break;
    before += here;
  }
  cut.weight |= static_cast<std::uint32_t>(bin) << shift_of(pass);
  cut.wanted = wanted - before;
  if (pass == MapCut::kPasses - 1) {
    cut.ties = static_cast<int>((cut.wanted + cut.weight - 1) / cut.weight);
  }
}

// Sums the weights up by their digit, of those that share the digits before; the last thread block of a
// head finds the digit of the cut.
template <int kPass>
__global__ void __launch_bounds__(kThreads) digit_kernel(const __grid_constant__ Arguments a) {
  __shared__ std::uint32_t low[kBins];
  __shared__ std::uint32_t high[kBins];
  __shared__ bool is_last;
  if (!wants(a)) return;
  MapCut& cut = a.plan.cuts[blockIdx.y];
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) low[i] = high[i] = 0;
  __syncthreads();
  constexpr int kShift = shift_of(kPass);
  constexpr int kKnownShift = kPass == 0 ? 32 : shift_of(kPass - 1);
  constexpr std::uint32_t kMask = (1U << (kKnownShift - kShift)) - 1;
  const std::uint32_t known = cut.weight;
  const Row row = row_of_warp(a);
  if (row.exists) {
    for_each_weight([&](int n) { return row.weights[n]; }, row.seen.begin, row.seen.end,
                    [&](std::uint32_t w) {
                      if (w == 0) return;
                      if constexpr (kPass > 0) {
                        if (w >> kKnownShift != known >> kKnownShift) return;
                      }
                      const std::uint32_t bin = w >> kShift & kMask;
                      // A sum of 64 bits in two atomic additions.
                      const std::uint32_t old = atomicAdd(&low[bin], w);
                      if (old + w < old) atomicAdd(&high[bin], 1);
                    });
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
    const unsigned long long sum = static_cast<unsigned long long>(high[i]) << 32 | low[i];
    if (sum != 0) atomicAdd(&cut.sums[kPass][i], sum);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&cut.finished[kPass], 1) == a.blocks - 1;
  __syncthreads();
  if (!is_last || threadIdx.x >= 32) return;
  __threadfence();
  // Nothing is wanted: the cut lies above everything.
  if (kPass > 0 && known == ~0U) return;
  find_digit(a, kPass, cut);
}

// Counts the entries of each row block that weigh as much as the cut.
__global__ void __launch_bounds__(kThreads) ties_kernel(const __grid_constant__ Arguments a) {
  if (!wants(a)) return;
  const Row row = row_of_warp(a);
  if (!row.exists) return;
  const std::uint32_t cut = a.plan.cuts[blockIdx.y].weight;
  std::uint32_t count = 0;
  for_each_weight([&](int n) { return row.weights[n]; }, row.seen.begin, row.seen.end,
                  [&](std::uint32_t w) { count += w == cut ? 1 : 0; });
  count = warp_sum(count);
  if (threadIdx.x % 32 == 0) {
    a.plan.ties[static_cast<std::int64_t>(blockIdx.y) * a.plan.scores.row_blocks + row.m] =
        static_cast<int>(count);
  }
}

// Writes the bits.
__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ Arguments a) {
  if (!wants(a)) return;
  const Row row = row_of_warp(a);
  if (!row.exists) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const MapCut& cut = a.plan.cuts[blockIdx.y];
  const int* ties = a.plan.ties + static_cast<std::int64_t>(blockIdx.y) * a.plan.scores.row_blocks;
  std::uint32_t earlier = 0;
  for (int m = lane; m < row.m; m += 32) earlier += static_cast<std::uint32_t>(ties[m]);
  int left =
      cut.ties - static_cast<int>(min(warp_sum(earlier), static_cast<std::uint32_t>(cut.ties)));
  std::uint32_t* bits = a.bits.row(a.first_head + static_cast<int>(blockIdx.y), row.m);
  for (int first = row.seen.begin / 32 * 32; first < row.seen.end; first += 32) {
    const bool exists = row.seen.contains(first + lane);
    const std::uint32_t w = exists ? row.weights[first + lane] : 0;
    const std::uint32_t equal = __ballot_sync(~0U, exists && w == cut.weight);
    const bool is_tie = (equal >> lane & 1) != 0 && __popc(equal & ((1U << lane) - 1)) < left;
    left -= min(__popc(equal), left);
    const std::uint32_t word = __ballot_sync(~0U, exists && (w > cut.weight || is_tie));
    if (lane == 0) bits[first / 32] = word;
  }
}

}  // namespace

PooledMap plan_pooled_map(const Problem& problem, int block_size, std::int64_t bytes,
                          MemoryPieces& workspace) {
  PooledMap plan;
  plan.scores = plan_pooled_scores(problem, block_size, bytes, workspace);
  plan.cuts = workspace.take<MapCut>(plan.scores.heads);
  plan.ties =
      workspace.take<int>(static_cast<std::int64_t>(plan.scores.heads) * plan.scores.row_blocks);
  return plan;
}

void write_pooled_map(const Problem& problem, const PooledMap& plan, const int* flags, double share,
                      const BlockBits& bits, cudaStream_t stream) {
  const PooledScores& scores = plan.scores;
  const HeadFilter filter{nullptr, flags};
  Arguments a{problem, plan, flags, bits, share};
  const auto blocks_of = [](int rows) { return (rows + kWarps - 1) / kWarps; };
  for (int row = 0; row < scores.row_blocks; row += scores.rows) {
    a.blocks += blocks_of(std::min(scores.rows, scores.row_blocks - row));
  }
  // Weights that do not fit are made again for each kernel that looks at them.
  const bool fits = scores.rows >= scores.row_blocks;
  const auto kernels = {digit_kernel<0>, digit_kernel<1>, digit_kernel<2>, ties_kernel,
                        keep_kernel};
  const int heads = problem.batch * problem.q_heads;
  for (a.first_head = 0; a.first_head < heads; a.first_head += scores.heads) {
    const int count = std::min(scores.heads, heads - a.first_head);
    check(cudaMemsetAsync(plan.cuts, 0, count * sizeof(MapCut), stream), "clearing sums");
    pool_queries(problem, scores, filter, a.first_head, count, stream);
    bool first = true;
    for (const auto kernel : kernels) {
      for (a.first_row = 0; a.first_row < scores.row_blocks; a.first_row += scores.rows) {
        const int rows = std::min(scores.rows, scores.row_blocks - a.first_row);
        const dim3 grid(blocks_of(rows), count);
        if (first || !fits) {
          score_means(problem, scores, filter, a.first_head, count, a.first_row, rows, stream);
          softmax_kernel<<<grid, kThreads, 0, stream>>>(a);
        }
        kernel<<<grid, kThreads, 0, stream>>>(a);
      }
      first = false;
    }
    check(cudaGetLastError(), "cutting a map of pooled scores");
  }
}

}  // namespace minference::cuda

// A product of matrices, cells of rows times cells of keys, whose inner axis is a cell's phases and dims.
// One warpgroup fetches tiles of 64 dims of one phase, two multiply 64 rows of cells each and sum up.
// Thread blocks are persistent; all tiles take the same time, so each block takes every n-th.
//
// On Hopper the products are faster than the L2 cache: the blocks of a cluster work on the same keys, of
// which each fetches a part for all.
#include "index/cuda/cell_scores.h"

#include <algorithm>
#include <numeric>

#include "attention/cuda/check.h"
#include "attention/cuda/device_kernels.h"
#include "attention/cuda/tensor_map.h"
#include "index/cuda/cell_sums.cuh"
#include "index/cuda/cell_tiles.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

using namespace cells;  // NOLINT(google-build-using-namespace): this file is its front

constexpr int kMostBlocks = 4;  // of a cluster

template <class T, int kColumns, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    cell_kernel(const __grid_constant__ Arguments a, const __grid_constant__ Maps maps) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kCluster > 1) {
    __trap();
  } else
#endif
  {
    extern __shared__ char memory[];
    char* aligned = memory + (1024 - shared_address(memory) % 1024) % 1024;
    const std::uint32_t stages = shared_address(aligned);
    auto& control = *reinterpret_cast<Control*>(
        aligned + a.stages * (CellScores::kTileRows + kColumns) * kRowBytes);
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < a.stages; ++stage) {
        mbarrier_init(shared_address(&control.full[stage]), 128);
        mbarrier_init(shared_address(&control.empty[stage]), 4 * kConsumers * kCluster);
      }
      if constexpr (kCluster > 1) fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kCluster > 1) cluster_barrier();
    if (threadIdx.x < 128) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      release_registers<72>();
#endif
      produce<kColumns, kCluster>(a, maps, kCluster > 1 ? cluster_rank() : 0, control, stages);
    } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      take_registers<216>();
#endif
      Consumer<T, kColumns, kCluster>(a, control, stages).run();
    }
    // No block may end while others copy to it or arrive at its barriers.
    __syncthreads();
    if constexpr (kCluster > 1) cluster_barrier();
  }
}

// Whether the current device got code with Hopper's matrix products, and is to use it.
bool has_wide_products() {
  static const bool compiled = [] {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, cell_kernel<__nv_bfloat16, 256, 2>),
          "asking for a kernel's attributes");
    return attributes.ptxVersion >= 90;
  }();
  return compiled && current_kernels() == 90;
}

// Boxes of 64 dims of one phase of `rows` cells of one head.
CUtensorMap cell_map(const DeviceTensor& tensor, const Problem& problem, int heads, int tokens,
                     int stride, int rows) {
  const auto size = [](std::int64_t extent) { return static_cast<cuuint64_t>(extent); };
  const cuuint64_t sizes[5] = {size(problem.dim), size(stride), size(heads),
                               size(std::max(tokens / stride, 1)), size(problem.batch)};
  // A stride along an axis of extent 1 is never followed, but must be legal.
  const auto bytes = [&](std::int64_t step, int axis) {
    return static_cast<cuuint64_t>(sizes[axis] > 1 ? step * 2 : 16);
  };
  const cuuint64_t strides[4] = {bytes(tensor.token_stride, 1), bytes(tensor.head_stride, 2),
                                 bytes(tensor.token_stride * stride, 3),
                                 bytes(tensor.batch_stride, 4)};
  const cuuint32_t box[5] = {kPanelDims, 1, 1, static_cast<cuuint32_t>(rows), 1};
  return encode_tensor_map(tensor, 5, sizes, strides, box);
}

// Whether the copy engine can follow the tensor.
bool has_bulk_copies(const DeviceTensor& tensor, int stride) {
  const auto legal = [](std::int64_t step) { return step >= 0 && step < std::int64_t{1} << 38; };
  return tensor.dtype != DType::kF32 && is_aligned(tensor) && tensor.token_stride > 0 &&
         legal(tensor.token_stride * stride) && legal(tensor.head_stride) &&
         legal(tensor.batch_stride);
}

template <class T>
void launch(const Arguments& a, const Maps& maps, cudaStream_t stream) {
  const int bytes = shared_bytes(a.columns, a.stages);
  const auto kernel = a.cluster == 4   ? cell_kernel<T, 256, 4>
                      : a.cluster == 2 ? cell_kernel<T, 256, 2>
                                       : cell_kernel<T, 128, 1>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(a.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(multiprocessors() / a.cluster * a.cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = a.cluster > 1 ? 1 : 0;
  // Tiles are dealt out to blocks that all run at the same time, and not every number of multiprocessors
  // that share a cluster's network is a multiple of 4.
  if (a.cluster == 4) {
    static const int clusters = [&] {
      int most = 0;
      check(cudaOccupancyMaxActiveClusters(&most, kernel, &config), "counting clusters");
      return std::max(most, 1);
    }();
    config.gridDim = dim3(clusters * 4);
  }
  check(cudaLaunchKernelEx(&config, kernel, a, maps), "scoring cells");
}

// Chooses how many rows, in whole units, and heads are worked on at a time.
void lay_out(const Problem& problem, int rows, int unit, std::int64_t bytes, CellScores& plan,
             MemoryPieces& workspace) {
  constexpr int kColumns = CellScores::kTileColumns;
  const int tiles = (plan.cells(problem.kv_tokens) + kColumns - 1) / kColumns;
  plan.slots = tiles * (kColumns / plan.slot);
  const std::int64_t step = std::lcm(CellScores::kTileRows, unit);
  const std::int64_t steps = (rows + step - 1) / step;
  const std::int64_t step_bytes = step * plan.row_sums() * static_cast<std::int64_t>(sizeof(float));
  plan.rows = static_cast<int>(std::clamp<std::int64_t>(bytes / step_bytes, 1, steps) * step);
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  plan.heads = static_cast<int>(std::clamp<std::int64_t>(bytes / (plan.rows / step * step_bytes), 1,
                                                         std::min<std::int64_t>(heads, 1024)));
  if (plan.heads > kMostBlocks) plan.heads -= plan.heads % kMostBlocks;
  plan.sums = workspace.take<float>(plan.heads * plan.rows * plan.row_sums());
}

}  // namespace

CellScores plan_cell_scores(const Problem& problem, int stride, int unit, float norm,
                            std::int64_t bytes, MemoryPieces& workspace) {
  CellScores plan;
  plan.stride = stride;
  plan.scale = problem.scale / (static_cast<float>(stride) * norm);
  plan.slot = std::gcd(unit, 16);
  lay_out(problem, plan.cells(problem.q_tokens), unit, bytes, plan, workspace);
  return plan;
}

CellScores plan_last_rows(const Problem& problem, int block_size, std::int64_t bytes,
                          MemoryPieces& workspace) {
  CellScores plan;
  plan.scale = problem.scale;
  plan.last_rows = block_size;
  plan.split = block_size;
  plan.slot = CellScores::kSplitSlot;
  // A part of the rows would be no use.
  const int rows = (block_size + CellScores::kTileRows - 1) / CellScores::kTileRows;
  lay_out(problem, block_size, rows * CellScores::kTileRows, bytes, plan, workspace);
  return plan;
}

void score_cells(const Problem& problem, const CellScores& plan, int first_head, int heads,
                 int first_row, int rows, cudaStream_t stream) {
  Arguments a{problem, plan, first_head, heads, first_row, rows};
  a.panels = (problem.dim + kPanelDims - 1) / kPanelDims;
  a.chunks = chunks_of(problem.q, problem.k);
  a.columns = has_wide_products() ? CellScores::kTileColumns : 128;
  // Where four blocks find work on the same keys they fetch less, which is worth more than the
  // multiprocessors that are left over.
  const bool four = rows >= kMostBlocks * CellScores::kTileRows ||
                    (problem.group % kMostBlocks == 0 && heads % kMostBlocks == 0 &&
                     first_head % kMostBlocks == 0);
  a.cluster = a.columns != CellScores::kTileColumns ? 1 : (four ? kMostBlocks : 2);
  a.stages = kStages;
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  while (a.stages > 2 && shared_bytes(a.columns, a.stages) > limit) --a.stages;
  a.side_by_side = a.cluster > 1 && problem.group % a.cluster == 0 && heads % a.cluster == 0 &&
                   first_head % a.cluster == 0;
  Maps maps{};
  if (a.cluster > 1) {
    a.bulk_rows = has_bulk_copies(problem.q, plan.stride);
    a.bulk_keys = has_bulk_copies(problem.k, plan.stride) && problem.block_table == nullptr;
    if (a.bulk_rows) {
      maps.rows = cell_map(problem.q, problem, problem.q_heads, problem.q_tokens, plan.stride,
                           CellScores::kTileRows);
    }
    if (a.bulk_keys) {
      maps.keys = cell_map(problem.k, problem, problem.kv_heads, problem.kv_tokens, plan.stride,
                           a.columns / a.cluster);
    }
  }
  if (problem.q.dtype == DType::kF16) {
    launch<__half>(a, maps, stream);
  } else {
    launch<__nv_bfloat16>(a, maps, stream);
  }
}

}  // namespace minference::cuda

#include "attention/cuda/gather_columns.h"

#include "attention/cuda/check.h"

namespace minference::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerHead = 16;
constexpr int kChunk = 8;  // 16-bit elements that are moved at a time

// One head a blockIdx.y; a group of threads copies a row, first the key, then the value.
__global__ void gather(const __grid_constant__ Problem problem,
                       const __grid_constant__ DeviceIndex index, GatheredColumns columns) {
  const int b = static_cast<int>(blockIdx.y) / problem.q_heads;
  const int kv_head = static_cast<int>(blockIdx.y) % problem.q_heads / problem.group;
  const DeviceHead head = index.heads[blockIdx.y];
  if (head.kind != HeadIndex::Kind::kDiagonal) return;
  const int rows = (head.column_count + kBoxKeys - 1) / kBoxKeys * kBoxKeys;
  const int kv_len = problem.kv_lens == nullptr ? problem.kv_tokens : problem.kv_lens[b];
  const int key_chunks = problem.dim / kChunk;
  const int chunks = key_chunks + problem.v_dim / kChunk;
  const std::int64_t total = static_cast<std::int64_t>(rows) * chunks;
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int row = static_cast<int>(i / chunks);
    const int chunk = static_cast<int>(i % chunks);
    const bool of_key = chunk < key_chunks;
    const int element = (of_key ? chunk : chunk - key_chunks) * kChunk;
    const int token = row < head.column_count ? index.columns[head.column_begin + row] : kv_len;
    uint4 moved = make_uint4(0, 0, 0, 0);
    if (token < kv_len) {
      const DeviceTensor& from = of_key ? problem.k : problem.v;
      moved = *reinterpret_cast<const uint4*>(from.data +
                                              (b * from.batch_stride + token * from.token_stride +
                                               kv_head * from.head_stride + element) *
                                                  2);
    }
    char* to = of_key ? columns.keys : columns.values;
    const std::int64_t dim = of_key ? problem.dim : problem.v_dim;
    *reinterpret_cast<uint4*>(to + ((head.column_begin + row) * dim + element) * 2) = moved;
  }
}

}  // namespace

void gather_columns(const Problem& problem, const DeviceIndex& index,
                    const GatheredColumns& columns, cudaStream_t stream) {
  const dim3 grid(kBlocksPerHead, static_cast<unsigned>(problem.batch * problem.q_heads));
  gather<<<grid, kThreads, 0, stream>>>(problem, index, columns);
  check(cudaGetLastError(), "gathering columns");
}

}  // namespace minference::cuda

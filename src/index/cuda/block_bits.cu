#include "index/cuda/block_bits.h"

#include "attention/cuda/check.h"

namespace minference::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ BlockBits bits, int count) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= count) return;
  DeviceHead head;
  if (bits.leaves_out[i] != 0) {
    head.kind = HeadIndex::Kind::kBlock;
    head.bit_block_size = bits.block_size;
    head.bit_words = bits.words;
    head.block_id_begin = static_cast<std::int64_t>(i) * bits.rows * bits.words;
  }
  bits.heads[i] = head;
}

}  // namespace

BlockBits plan_block_bits(const Problem& problem, int block_size, MemoryPieces& workspace) {
  BlockBits bits;
  bits.block_size = block_size;
  bits.rows = (problem.q_tokens + block_size - 1) / block_size;
  bits.words = ((problem.kv_tokens + block_size - 1) / block_size + 31) / 32;
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  bits.heads = workspace.take<DeviceHead>(heads);
  bits.bits = workspace.take<std::uint32_t>(
      checked_mul(heads * bits.rows, bits.words, "the bits of an index"));
  bits.leaves_out = workspace.take<int>(heads);
  return bits;
}

void begin_block_bits(const Problem& problem, const BlockBits& bits, cudaStream_t stream) {
  const std::size_t heads = static_cast<std::size_t>(problem.batch) * problem.q_heads;
  check(cudaMemsetAsync(bits.leaves_out, 0, heads * sizeof(int), stream), "clearing flags");
}

void finish_block_bits(const Problem& problem, const BlockBits& bits, cudaStream_t stream) {
  const int heads = problem.batch * problem.q_heads;
  finish_kernel<<<(heads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(bits, heads);
  check(cudaGetLastError(), "finishing an index of bits");
}

}  // namespace minference::cuda

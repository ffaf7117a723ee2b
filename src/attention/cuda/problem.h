// What every CUDA attention kernel reads: one call of attention() in plain device terms.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "minference/tensor.h"

namespace minference::cuda {

// Query rows that one thread block works on: kGroups groups of one row block of the index each.
inline constexpr int kGroupRows = 64;
inline constexpr int kGroups = 2;
inline constexpr int kTileRows = kGroupRows * kGroups;
// Keys that are loaded and multiplied at a time, from any key on.
inline constexpr int kBoxKeys = 64;

// Ints of device memory that a call of an executor needs for its own use: the next tile, whether an
// output was not finite, and the next tile of those that are computed again for it.
inline constexpr int kTickets = 3;

// A tensor [batch, tokens, heads, dim]; strides in elements, dim contiguous.
struct DeviceTensor {
  char* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  DType dtype = DType::kBF16;
};

// Positions fit in 32 bits: a sequence has less than 2^30 keys. Pointers are device memory.
struct Problem {
  DeviceTensor q, k, v, out;
  DeviceTensor lse;                           // data null: not wanted
  const std::int32_t* q_lens = nullptr;       // [batch], null: q_tokens
  const std::int32_t* kv_lens = nullptr;      // [batch], null: kv_tokens
  const std::int32_t* block_table = nullptr;  // [batch, pages_per_sequence], null: not paged
  const float* sinks = nullptr;               // [q_heads] or null
  const std::uint64_t* mask = nullptr;        // VisibilityMask::words or null
  std::int64_t mask_row_stride = 0;
  std::int64_t mask_sequence_stride = 0;
  std::int32_t batch = 0;
  std::int32_t q_tokens = 0;
  std::int32_t kv_tokens = 0;  // of a sequence; with pages: their capacity
  std::int32_t q_heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t group = 1;  // q_heads / kv_heads
  std::int32_t dim = 0;
  std::int32_t v_dim = 0;
  std::int32_t page_size = 0;
  std::int32_t pages_per_sequence = 0;
  std::int32_t window = 0;  // 0: none
  bool causal = true;
  float scale = 0;
  float soft_cap = 0;
  unsigned long long* kept_pairs = nullptr;  // counted when not null
};

// Sizes and visibility rules of one sequence; as SequenceGeometry on the CPU.
struct Geometry {
  std::int32_t q_len = 0;
  std::int32_t kv_len = 0;
  std::int32_t window = 0;
  bool causal = true;

  MINFERENCE_HOST_DEVICE std::int32_t position(std::int32_t row) const {
    return kv_len - q_len + row;
  }
  // The row sees keys [first_key(row), end_key(row)), unless a mask says otherwise.
  MINFERENCE_HOST_DEVICE std::int32_t first_key(std::int32_t row) const {
    const std::int32_t first = position(row) - window + 1;
    return window == 0 || first < 0 ? 0 : (first < kv_len ? first : kv_len);
  }
  MINFERENCE_HOST_DEVICE std::int32_t end_key(std::int32_t row) const {
    if (!causal) return kv_len;
    const std::int32_t end = position(row) + 1;
    return end < 0 ? 0 : (end < kv_len ? end : kv_len);
  }
};

#ifdef __CUDACC__
__device__ inline Geometry sequence_geometry(const Problem& problem, int b) {
  Geometry geometry;
  geometry.q_len = problem.q_lens == nullptr ? problem.q_tokens : problem.q_lens[b];
  geometry.kv_len = problem.kv_lens == nullptr ? problem.kv_tokens : problem.kv_lens[b];
  geometry.window = problem.window;
  geometry.causal = problem.causal && problem.mask == nullptr;
  return geometry;
}
#endif

}  // namespace minference::cuda

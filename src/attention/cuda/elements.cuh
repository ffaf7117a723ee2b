// Elements of device tensors of any dtype, and where the rows of keys and values lie.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"

namespace minference::cuda {

__device__ inline int element_size(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Element i of an array of `dtype`; exact.
__device__ inline float load_element(const char* row, DType dtype, int i) {
  switch (dtype) {
    case DType::kF32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::kF16:
      return __half2float(reinterpret_cast<const __half*>(row)[i]);
    case DType::kBF16:
      break;
  }
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
}

// Rounds `value` to `dtype` and stores it as element i.
__device__ inline void store_element(char* row, DType dtype, int i, float value) {
  switch (dtype) {
    case DType::kF32:
      reinterpret_cast<float*>(row)[i] = value;
      return;
    case DType::kF16:
      reinterpret_cast<__half*>(row)[i] = __float2half_rn(value);
      return;
    case DType::kBF16:
      reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(value);
      return;
  }
}

// Rounds up to `left` of two neighbours to `dtype` and stores them as elements i and i + 1.
__device__ inline void store_pair(char* row, DType dtype, int i, int left, float a, float b) {
  if (left <= 0) return;
  char* const to = row + i * element_size(dtype);
  if (dtype != DType::kF32 && left > 1 && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) =
        dtype == DType::kBF16 ? pack_pair<__nv_bfloat16>(a, b) : pack_pair<__half>(a, b);
    return;
  }
  store_element(row, dtype, i, a);
  if (left > 1) store_element(row, dtype, i + 1, b);
}

// Address of row [b, t, h, :].
__device__ inline char* tensor_row(const DeviceTensor& tensor, int b, int t, int h) {
  return tensor.data +
         (b * tensor.batch_stride + t * tensor.token_stride + h * tensor.head_stride) *
             element_size(tensor.dtype);
}

// Addresses of a tile's rows of keys or values from key `first` on, or from column `first` of the head.
class BoxRows {
 public:
  __device__ BoxRows(const Problem& problem, const DeviceIndex& index, const RowTile& tile,
                     int first, bool columns, const DeviceTensor& tensor)
      : page_size_(problem.page_size),
        page_stride_(tensor.batch_stride * element_size(tensor.dtype)),
        token_stride_(tensor.token_stride * element_size(tensor.dtype)) {
    const int kv_head = tile.h / problem.group;
    if (problem.block_table == nullptr) {
      first_ = tensor_row(tensor, tile.b, 0, kv_head);
    } else {
      first_ = tensor_row(tensor, 0, 0, kv_head);
      pages_ = problem.block_table + static_cast<std::int64_t>(tile.b) * problem.pages_per_sequence;
    }
    if (columns) {
      const DeviceHead& head = index.heads[tile.b * problem.q_heads + tile.h];
      columns_ = index.columns + head.column_begin + first;
      count_ = head.column_count - first;
    } else {
      start_ = first;
      count_ = sequence_geometry(problem, tile.b).kv_len - first;
    }
  }

  // Null where the row does not exist.
  __device__ const char* row(int r) const {
    if (r >= count_ || start_ + r < 0) return nullptr;
    const int key = columns_ != nullptr ? columns_[r] : start_ + r;
    if (pages_ == nullptr) return first_ + key * token_stride_;
    // Page sizes are powers of two nearly always, and a division costs as much as the rest.
    const bool power = (page_size_ & (page_size_ - 1)) == 0;
    const int page = power ? key >> (31 - __clz(page_size_)) : key / page_size_;
    return first_ + pages_[page] * page_stride_ + (key - page * page_size_) * token_stride_;
  }

 private:
  const char* first_;  // row 0 of the sequence, or of page 0
  const std::int32_t* pages_ = nullptr;
  int page_size_;
  std::int64_t page_stride_;  // in bytes
  std::int64_t token_stride_;
  const std::int32_t* columns_ = nullptr;
  int start_ = 0;
  int count_ = 0;
};

// Softmax sum of a row, relative to 2^shift; its sink taken in, and what that makes of it.
struct RowSum {
  float sum = 0;
  float shift = -INFINITY;

  // Factor on the row's weighted sum of values.
  __device__ float close(const float* sinks, int head) {
    const float sink = sinks == nullptr ? -INFINITY : sinks[head] * kLog2E;
    // A sum of exactly 0 is a row that saw no key.
    if (sum == 0) {
      shift = sink;
      sum = sink == -INFINITY ? 0.0F : 1.0F;
      return 0;
    }
    if (sink <= shift) {
      sum += exp2f(sink - shift);
      return 1 / sum;
    }
    if (!(sink > shift)) return 1 / sum;  // NaN
    const float factor = exp2f(shift - sink);
    sum = sum * factor + 1;
    shift = sink;
    return factor / sum;
  }

  // Natural logarithm of the sum of exponentials.
  __device__ float lse() const {
    constexpr float kLn2 = 0.6931471805599453F;
    return sum == 0 ? -INFINITY : (shift + log2f(sum)) * kLn2;
  }
};

__device__ inline void store_lse(const Problem& problem, int b, int row, int h, float lse) {
  if (problem.lse.data == nullptr) return;
  *reinterpret_cast<float*>(tensor_row(problem.lse, b, row, h)) = lse;
}

}  // namespace minference::cuda

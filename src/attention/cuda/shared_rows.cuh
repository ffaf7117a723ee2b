// SharedRows: rows of 16-bit elements in shared memory, swizzled for the fragments of products.
#pragma once

#include <cstdint>

#include "attention/cuda/elements.cuh"
#include "attention/cuda/mma.cuh"

namespace minference::cuda {

// Chunks of 16 bytes of a row that change places among themselves, so that the same chunk of
// neighbouring rows does not lie in the same banks.
template <int kWidth>
constexpr int kSwizzled = kWidth % 64 == 0 ? 8 : 4;

// Place of chunk c of row r within the row.
template <int kWidth>
__device__ __forceinline__ int swizzled(int c, int r) {
  return kSwizzled<kWidth> == 8 ? c ^ (r & 7) : c ^ (r >> 1 & 3);
}

// Address of the chunk `chunks` (even) behind the one at an address, for a fragment's lanes: the
// swizzle is an exclusive or of the address' bits, and the rest is a constant.
template <int kWidth>
__device__ __forceinline__ std::uint32_t chunks_behind(std::uint32_t address, int chunks) {
  constexpr int kInside = kSwizzled<kWidth> - 1;
  return (address ^ ((chunks & kInside) * 16)) + (chunks & ~kInside) * 16;
}

// Rows in shared memory that the threads of the block fill in chunks of 8 elements. What does not
// exist, and dims from `dim` on, become 0. A thread fills the same chunks of every kStep-th row.
template <class T, int kWidth, int kRows, int kThreads>
struct SharedRows {
  static constexpr int kChunks = kWidth / 8;
  static constexpr int kTogether = kSwizzled<kWidth>;
  static constexpr int kStep = kThreads / kTogether;
  static constexpr int kTurns = kRows / kStep;
  static_assert(kTurns * kStep == kRows && kStep % 8 == 0 && kChunks % kTogether == 0);

  std::uint32_t to;
  int dim;

  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kTogether; }
  __device__ __forceinline__ static int chunk() {
    return static_cast<int>(threadIdx.x) % kTogether;
  }
  __device__ __forceinline__ std::uint32_t place() const {
    return to + (row() * kChunks + swizzled<kWidth>(chunk(), row())) * 16;
  }

  // Rows that follow each other at a distance of `stride` elements; [begin, end) exist.
  __device__ __forceinline__ void copy(const char* first, std::int64_t stride, int begin,
                                       int end) const {
    const std::uint32_t place = this->place();
    const char* from = first + row() * stride * 2 + chunk() * 16;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int r = row() + turn * kStep;
#pragma unroll
      for (int c = 0; c < kChunks; c += kTogether) {
        cp_async_16(place + (turn * kStep * kChunks + c) * 16, from + c * 16,
                    r >= begin && r < end && (chunk() + c) * 8 < dim);
      }
      from += stride * (2 * kStep);
    }
  }

  // Rows from anywhere: `from(r)` gives the address of a row, null where there is none.
  template <class From>
  __device__ __forceinline__ void gather(const From& from) const {
    // Addresses wait for memory: all of them at the same time.
    const char* rows[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) rows[turn] = from(row() + turn * kStep);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int c = 0; c < kChunks; c += kTogether) {
        cp_async_16(place() + (turn * kStep * kChunks + c) * 16, rows[turn] + (chunk() + c) * 16,
                    rows[turn] != nullptr && (chunk() + c) * 8 < dim);
      }
    }
  }

  // Any dtype and alignment.
  template <class From>
  __device__ __forceinline__ void convert(DType dtype, const From& from) const {
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const char* const source = from(row() + turn * kStep);
#pragma unroll 1
      for (int c = 0; c < kChunks; c += kTogether) {
        copy_elements(place() + (turn * kStep * kChunks + c) * 16, source, dtype, (chunk() + c) * 8,
                      source == nullptr ? 0 : dim);
      }
    }
  }

 private:
  // Converts up to 8 elements of a row.
  __device__ __forceinline__ static void copy_elements(std::uint32_t to, const char* row,
                                                       DType dtype, int begin, int end) {
#pragma unroll 1
    for (int d = begin; d < begin + 8; d += 2) {
      const float a = d < end ? load_element(row, dtype, d) : 0.0F;
      const float b = d + 1 < end ? load_element(row, dtype, d + 1) : 0.0F;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + (d - begin) * 2), "r"(pack_pair<T>(a, b))
                   : "memory");
    }
  }
};

}  // namespace minference::cuda

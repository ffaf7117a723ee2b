// linear(): the matrix product of prefill, activations times the rows of an unpacked-on-the-fly weight.
#pragma once

#include <cstdint>

#include "minference/attention.h"
#include "minference/isa.h"

namespace minference {

// A weight matrix of any storage type, read through a callback. Nothing is copied or kept.
struct LinearWeight {
  std::int64_t rows = 0;  // output features, N
  std::int64_t cols = 0;  // input features, K
  // Writes elements [begin, begin + count) of a row as f32. begin is a multiple of kUnpackChunk and
  // count is kUnpackChunk, or less at the row's end. Called from several threads; must not throw.
  void (*unpack)(const void* context, std::int64_t row, std::int64_t begin, std::int64_t count,
                 float* out) = nullptr;
  const void* context = nullptr;

  // A multiple of the block size of every ggml type.
  static constexpr std::int64_t kUnpackChunk = 256;
};

// Computes c[m][n] = sum_k a[m][k] * w[n][k] for a [tokens, cols] f32 with rows `a_stride` elements
// apart, c [tokens, rows] f32 with rows `c_stride` apart. Products in bf16 where `precision` allows
// and the machine has them (kAuto allows), accumulated in f32. Memory: the activations once in the
// kernels' element type, and about 1 MB of unpacked weights a thread.
// Throws InvalidArgument for sizes below 1, strides below the row length, or a null pointer.
void linear(const float* a, std::int64_t a_stride, std::int64_t tokens, const LinearWeight& weight,
            float* c, std::int64_t c_stride, Precision precision, int threads);

// The same at a given level, which must be available.
void linear_cpu(const float* a, std::int64_t a_stride, std::int64_t tokens,
                const LinearWeight& weight, float* c, std::int64_t c_stride, IsaLevel level,
                int threads);

}  // namespace minference

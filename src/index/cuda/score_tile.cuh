// Tiles of keys and queries in shared memory, and their scores on tensor cores.
//
// Scores come transposed: 64 keys down, 64 queries across. So the sum over queries of one key lies in
// four lanes, and what crosses warps is little. Lane l of warp w of a warpgroup holds, at
// 4 * j + 2 * i + e, the score of tile row 16 * w + 8 * i + l / 4 against query 8 * j + 2 * (l % 4) + e.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/cuda/mma.cuh"
#include "attention/cuda/problem.h"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/softmax.cuh"

namespace minference::cuda {

inline constexpr int kTileTokens = 64;  // rows of a tile, of keys or of queries
inline constexpr int kPanelDims = 64;   // 128 bytes a row: what the swizzle permutes
inline constexpr int kPanelBytes = kTileTokens * kPanelDims * 2;
inline constexpr int kChunkDims = 8;  // 16 bytes, moved at a time
inline constexpr int kScores = 32;    // a lane

// Byte offset of a chunk of a tile's row within its panel.
__device__ inline int chunk_offset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Barriers in shared memory on Ampere too, which has them without the later conveniences.
__device__ inline void arrive_at(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  mbarrier_arrive(barrier);
#else
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
#endif
}
__device__ inline void wait_for_phase(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(barrier, parity);
#else
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}
// Before tensor cores read what this thread wrote to shared memory.
__device__ inline void fence_for_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  fence_async_proxy();
#endif
}

// How rows of queries and keys are read, a chunk at a time.
enum class Chunks : std::uint8_t {
  kWhole,  // 16 bytes, at addresses that are multiples of 16
  kParts,  // element by element
  kF32,    // likewise, rounded to bf16
};

MINFERENCE_HOST_DEVICE inline int element_bytes(Chunks chunks) {
  return chunks == Chunks::kF32 ? 4 : 2;
}

__device__ inline int element_bytes(const DeviceTensor& tensor) {
  return tensor.dtype == DType::kF32 ? 4 : 2;
}

// Element 0 of a key of a KV head.
__device__ inline const char* key_row(const Problem& problem, int b, int kv_head, int key) {
  const DeviceTensor& k = problem.k;
  std::int64_t at = kv_head * k.head_stride;
  if (problem.block_table == nullptr) {
    at += b * k.batch_stride + key * k.token_stride;
  } else {
    const std::int32_t page =
        problem.block_table[static_cast<std::int64_t>(b) * problem.pages_per_sequence +
                            key / problem.page_size];
    at += page * k.batch_stride + key % problem.page_size * k.token_stride;
  }
  return k.data + at * element_bytes(k);
}

// Element 0 of a query of a head.
__device__ inline const char* query_row(const Problem& problem, int b, int h, int row) {
  const DeviceTensor& q = problem.q;
  return q.data +
         (b * q.batch_stride + row * q.token_stride + h * q.head_stride) * element_bytes(q);
}

// A chunk at any address; zeros when it does not exist.
__device__ inline void read_chunk(const char* from, bool exists, Chunks chunks,
                                  std::uint32_t (&words)[4]) {
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
    if (!exists) continue;
    if (chunks == Chunks::kF32) {
      const auto* elements = reinterpret_cast<const float*>(from) + 2 * i;
      words[i] = pack_pair<__nv_bfloat16>(elements[0], elements[1]);
    } else {
      const auto* elements = reinterpret_cast<const std::uint16_t*>(from) + 2 * i;
      words[i] = elements[0] | static_cast<std::uint32_t>(elements[1]) << 16;
    }
  }
}

__device__ inline void store_chunk(std::uint32_t to, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// A chunk that cp_async_16() cannot take.
__device__ inline void copy_chunk(std::uint32_t to, const char* from, bool exists, Chunks chunks) {
  std::uint32_t words[4];
  read_chunk(from, exists, chunks, words);
  store_chunk(to, words);
}

// Copies chunk `chunk` of every panel of a row that exists, zeros otherwise and behind `dim`.
template <int kPanels>
__device__ inline void load_row_chunks(std::uint32_t tile, int row, int chunk, const char* from,
                                       bool exists, int dim, Chunks chunks) {
  std::uint32_t to = tile + chunk_offset(row, chunk);
#pragma unroll
  for (int p = 0; p < kPanels; ++p, to += kPanelBytes) {
    const int first = p * kPanelDims + chunk * kChunkDims;
    const bool inside = exists && first < dim;
    if (chunks == Chunks::kWhole) {
      cp_async_16(to, from + (inside ? first * 2 : 0), inside);
    } else {
      copy_chunk(to, from + first * element_bytes(chunks), inside, chunks);
    }
  }
}

// Whether rows of a tensor of 16-bit elements can be read in chunks of 16 bytes.
inline bool is_aligned(const DeviceTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         tensor.batch_stride % kChunkDims == 0 && tensor.token_stride % kChunkDims == 0 &&
         tensor.head_stride % kChunkDims == 0;
}

// Of tensors of one type.
inline Chunks chunks_of(const DeviceTensor& a, const DeviceTensor& b) {
  if (a.dtype == DType::kF32) return Chunks::kF32;
  return is_aligned(a) && is_aligned(b) ? Chunks::kWhole : Chunks::kParts;
}

// Scores 4 * j ... 4 * j + 3.
__device__ inline float (&quad(float (&scores)[kScores], int j))[4] {
  return *reinterpret_cast<float(*)[4]>(scores + 4 * j);
}

// Starts the products of a tile of keys with a tile of queries, by one warpgroup; kAdd: added to the
// scores. They may be used after finish_products().
template <class T, int kPanels, bool kAdd = false>
__device__ inline void start_products(std::uint32_t keys, std::uint32_t queries,
                                      float (&scores)[kScores], int first_octet = 0) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  pin(scores);
  wgmma_fence();
  const MatrixDescriptor a(keys, 16, 1024);
  const MatrixDescriptor b(queries, 16, 1024);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      wgmma_ss<T, false>(scores, a.at(p * kPanelBytes + 32 * s), b.at(p * kPanelBytes + 32 * s),
                         kAdd || p + s > 0);
    }
  }
  wgmma_commit();
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kScores && !kAdd; ++i) scores[i] = 0.0F;
#pragma unroll 1
  for (int p = 0; p < kPanels; ++p, keys += kPanelBytes, queries += kPanelBytes) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      std::uint32_t a[4];
      ldmatrix_x4(a, keys + chunk_offset(row, 2 * s + lane / 16));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        if (j + 1 < first_octet) continue;
        std::uint32_t b[4];
        const int query = 8 * j + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(b, queries + chunk_offset(query, 2 * s + lane / 8 % 2));
        mma_16816<T>(quad(scores, j), a, b[0], b[1]);
        mma_16816<T>(quad(scores, j + 1), a, b[2], b[3]);
      }
    }
  }
#endif
}

__device__ inline void finish_products(float (&scores)[kScores]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_wait<0>();
  pin(scores);
#endif
}

}  // namespace minference::cuda

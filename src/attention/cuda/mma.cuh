// Raw PTX that runs from sm_80 on: asynchronous 16-byte copies and products of a single warp.
#pragma once

#include <cstdint>

#include "attention/cuda/ptx.cuh"

namespace minference::cuda {

// Copies 16 bytes to shared memory without passing registers; fills with 0 where !exists.
__device__ inline void cp_async_16(std::uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void store_shared(std::uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ inline float2 load_shared(std::uint32_t from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(from)
               : "memory");
  return pair;
}

// As ldmatrix_x4(), each matrix transposed.
__device__ inline void ldmatrix_x4_trans(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// d += a * b: a is 16 x 16, b 16 x 8, d 16 x 8.
template <class T>
__device__ void mma_16816(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                          std::uint32_t b1);

#define MINFERENCE_MMA(T, PTX)                                                                    \
  template <>                                                                                     \
  __device__ inline void mma_16816<T>(float(&d)[4], const std::uint32_t(&a)[4], std::uint32_t b0, \
                                      std::uint32_t b1) {                                         \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX "." PTX                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                 \
  }

MINFERENCE_MMA(__nv_bfloat16, "bf16")
MINFERENCE_MMA(__half, "f16")
#undef MINFERENCE_MMA

}  // namespace minference::cuda

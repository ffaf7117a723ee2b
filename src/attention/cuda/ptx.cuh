// Raw PTX of Hopper and Ampere: one wrapper an instruction, named after it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace minference::cuda {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: phases of a shared-memory barrier that counts arrivals and bytes.

__device__ inline void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase wait for this many bytes of bulk copies.
__device__ inline void mbarrier_arrive_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is over.
__device__ inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Bulk tensor copies (TMA). Coordinates count elements, innermost first; what lies outside the
// tensor arrives as 0.

__device__ inline void copy_tensor_4d(std::uint32_t to, const CUtensorMap* map,
                                      std::uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ inline void copy_tensor_5d(std::uint32_t to, const CUtensorMap* map,
                                      std::uint32_t barrier, int c0, int c1, int c2, int c3,
                                      int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// To the same place in every block of the cluster whose bit is set; each block's own barrier counts.
__device__ inline void copy_tensor_5d_multicast(std::uint32_t to, const CUtensorMap* map,
                                                std::uint32_t barrier, std::uint16_t blocks, int c0,
                                                int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Lets the current phase wait for this many bytes of bulk copies.
__device__ inline void mbarrier_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// ---- Clusters of thread blocks.

__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Waits for every thread of the cluster.
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the barrier in the same place of another block of the cluster. What the thread wrote is not
// made visible there: a release for the cluster waits for all memory of the device, a microsecond each time.
__device__ inline void mbarrier_arrive_at(std::uint32_t barrier, int block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// ---- Registers and proxies.

// Hands registers of this warpgroup back, or takes them.
template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders this thread's ordinary shared-memory writes before later reads by tensor cores and copies.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of some of the block's warps.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Fragments.

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix_x4(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Two f32 rounded to a pair of 16-bit elements, `low` in the low half.
template <class T>
__device__ inline std::uint32_t pack_pair(float low, float high);
template <>
__device__ inline std::uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ inline std::uint32_t pack_pair<__half>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x, about 2 units in the last place; denormals are 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- wgmma: asynchronous matrix products of a warpgroup, 64 rows, B from shared memory.

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of registers over this point.
template <class Register, int kCount>
__device__ inline void pin(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(Register) == 4 && std::is_same_v<Register, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// Describes an operand in shared memory with the 128-byte swizzle, made of pieces of 64 elements by
// 8 rows (1,024 bytes). leading: bytes between pieces along the contiguous axis (only where that is
// not the axis summed over); stride: between pieces along the other.
class MatrixDescriptor {
 public:
  __device__ MatrixDescriptor(std::uint32_t address, int leading, int stride)
      // The same in every lane: the shuffle tells the compiler so.
      : low_(__shfl_sync(
            ~0U, (address & 0x3FFFF) >> 4 | static_cast<std::uint32_t>(leading >> 4) << 16, 0)),
        high_(static_cast<std::uint32_t>(stride >> 4) | 1U << 30) {}

  // Of the operand `bytes` further on.
  __device__ std::uint64_t at(int bytes) const {
    return static_cast<std::uint64_t>(high_) << 32 | (low_ + (bytes >> 4));
  }

 private:
  std::uint32_t low_;
  std::uint32_t high_;
};

// Operand lists of the instructions below.
#define MINFERENCE_REGISTERS_32                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define MINFERENCE_REGISTERS_64                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define MINFERENCE_REGISTERS_96                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define MINFERENCE_REGISTERS_128                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
  "%127}"
#define MINFERENCE_ACC_8(d, i)                                                              \
  "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
      "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define MINFERENCE_ACC_32(d, i)                                                        \
  MINFERENCE_ACC_8(d, i), MINFERENCE_ACC_8(d, (i) + 8), MINFERENCE_ACC_8(d, (i) + 16), \
      MINFERENCE_ACC_8(d, (i) + 24)
#define MINFERENCE_ACC_64(d, i) MINFERENCE_ACC_32(d, i), MINFERENCE_ACC_32(d, (i) + 32)
#define MINFERENCE_ACC_96(d, i) MINFERENCE_ACC_64(d, i), MINFERENCE_ACC_32(d, (i) + 64)
#define MINFERENCE_ACC_128(d, i) MINFERENCE_ACC_64(d, i), MINFERENCE_ACC_64(d, (i) + 64)

// wgmma_rs: d += a * b, a 64 x 16 from registers, b 16 x N; kBTransposed: b's contiguous axis is N.
// wgmma_ss: d = (accumulate ? d : 0) + a * b, both from shared memory.
template <class T, bool kBTransposed, int kHalfN>
__device__ void wgmma_rs(float (&d)[kHalfN], const std::uint32_t (&a)[4], std::uint64_t b,
                         int accumulate);
template <class T, bool kBTransposed, int kHalfN>
__device__ void wgmma_ss(float (&d)[kHalfN], std::uint64_t a, std::uint64_t b, int accumulate);

#define MINFERENCE_WGMMA_64(T, PTX, TRANSPOSED)                                                 \
  template <>                                                                                   \
  __device__ inline void wgmma_rs<T, TRANSPOSED, 32>(float(&d)[32], const std::uint32_t(&a)[4], \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_32   \
        ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                       \
        : MINFERENCE_ACC_32(d, 0)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                  \
          "n"(TRANSPOSED ? 1 : 0));                                                             \
  }                                                                                             \
  template <>                                                                                   \
  __device__ inline void wgmma_ss<T, TRANSPOSED, 32>(float(&d)[32], std::uint64_t a,            \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_32   \
        ", %32, %33, p, 1, 1, 0, %35;\n}\n"                                                     \
        : MINFERENCE_ACC_32(d, 0)                                                               \
        : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED ? 1 : 0));                            \
  }
#define MINFERENCE_WGMMA_128(T, PTX, TRANSPOSED)                                                \
  template <>                                                                                   \
  __device__ inline void wgmma_rs<T, TRANSPOSED, 64>(float(&d)[64], const std::uint32_t(&a)[4], \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_64  \
        ", {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                       \
        : MINFERENCE_ACC_64(d, 0)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                  \
          "n"(TRANSPOSED ? 1 : 0));                                                             \
  }                                                                                             \
  template <>                                                                                   \
  __device__ inline void wgmma_ss<T, TRANSPOSED, 64>(float(&d)[64], std::uint64_t a,            \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_64  \
        ", %64, %65, p, 1, 1, 0, %67;\n}\n"                                                     \
        : MINFERENCE_ACC_64(d, 0)                                                               \
        : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED ? 1 : 0));                            \
  }
#define MINFERENCE_WGMMA_192(T, PTX, TRANSPOSED)                                                \
  template <>                                                                                   \
  __device__ inline void wgmma_rs<T, TRANSPOSED, 96>(float(&d)[96], const std::uint32_t(&a)[4], \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"                                           \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_96  \
        ", {%96, %97, %98, %99}, %100, p, 1, 1, %102;\n}\n"                                     \
        : MINFERENCE_ACC_96(d, 0)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                  \
          "n"(TRANSPOSED ? 1 : 0));                                                             \
  }                                                                                             \
  template <>                                                                                   \
  __device__ inline void wgmma_ss<T, TRANSPOSED, 96>(float(&d)[96], std::uint64_t a,            \
                                                     std::uint64_t b, int accumulate) {         \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_96  \
        ", %96, %97, p, 1, 1, 0, %99;\n}\n"                                                     \
        : MINFERENCE_ACC_96(d, 0)                                                               \
        : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED ? 1 : 0));                            \
  }
#define MINFERENCE_WGMMA_256(T, PTX, TRANSPOSED)                                                  \
  template <>                                                                                     \
  __device__ inline void wgmma_rs<T, TRANSPOSED, 128>(float(&d)[128], const std::uint32_t(&a)[4], \
                                                      std::uint64_t b, int accumulate) {          \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_128   \
        ", {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}\n"                                   \
        : MINFERENCE_ACC_128(d, 0)                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                    \
          "n"(TRANSPOSED ? 1 : 0));                                                               \
  }                                                                                               \
  template <>                                                                                     \
  __device__ inline void wgmma_ss<T, TRANSPOSED, 128>(float(&d)[128], std::uint64_t a,            \
                                                      std::uint64_t b, int accumulate) {          \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." PTX "." PTX " " MINFERENCE_REGISTERS_128   \
        ", %128, %129, p, 1, 1, 0, %131;\n}\n"                                                    \
        : MINFERENCE_ACC_128(d, 0)                                                                \
        : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED ? 1 : 0));                              \
  }
#define MINFERENCE_WGMMA_OF(T, PTX)   \
  MINFERENCE_WGMMA_64(T, PTX, false)  \
  MINFERENCE_WGMMA_64(T, PTX, true)   \
  MINFERENCE_WGMMA_128(T, PTX, false) \
  MINFERENCE_WGMMA_128(T, PTX, true)  \
  MINFERENCE_WGMMA_192(T, PTX, true)  \
  MINFERENCE_WGMMA_256(T, PTX, false) \
  MINFERENCE_WGMMA_256(T, PTX, true)

MINFERENCE_WGMMA_OF(__nv_bfloat16, "bf16")
MINFERENCE_WGMMA_OF(__half, "f16")

#undef MINFERENCE_WGMMA_64
#undef MINFERENCE_WGMMA_128
#undef MINFERENCE_WGMMA_192
#undef MINFERENCE_WGMMA_256
#undef MINFERENCE_WGMMA_OF
#undef MINFERENCE_REGISTERS_32
#undef MINFERENCE_ACC_32
#undef MINFERENCE_REGISTERS_64
#undef MINFERENCE_ACC_64
#undef MINFERENCE_REGISTERS_96
#undef MINFERENCE_ACC_96
#undef MINFERENCE_REGISTERS_128
#undef MINFERENCE_ACC_128
#undef MINFERENCE_ACC_8

}  // namespace minference::cuda

#include "attention/cpu/kernel_table.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace minference::cpu {

const KernelTable& generic_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& amx_bf16_kernels();

// The build defines MINFERENCE_HAVE_ISA_<LEVEL> for each level that it compiles.
const KernelTable* kernel_table(IsaLevel level) {
  switch (level) {
    case IsaLevel::kGeneric:
      return &generic_kernels();
#ifdef MINFERENCE_HAVE_ISA_AVX2
    case IsaLevel::kAvx2:
      return &avx2_kernels();
#endif
#ifdef MINFERENCE_HAVE_ISA_AVX512
    case IsaLevel::kAvx512:
      return &avx512_kernels();
#endif
#ifdef MINFERENCE_HAVE_ISA_AVX512_BF16
    case IsaLevel::kAvx512Bf16:
      return &avx512_bf16_kernels();
#endif
#ifdef MINFERENCE_HAVE_ISA_AMX_BF16
    case IsaLevel::kAmxBf16:
      return &amx_bf16_kernels();
#endif
    default:
      return nullptr;
  }
}

#ifdef __x86_64__
namespace {

// GCC 12 knows no name for the AMX features in __builtin_cpu_supports, so CPUID is asked directly:
// leaf 7, EDX bit 22 (AMX-BF16) and bit 24 (AMX-TILE). Linux also wants a permission for the tile
// state, once per process and before threads use it (arch_prctl ARCH_REQ_XCOMP_PERM).
bool request_amx() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx >> 22 & 1U) == 0 || (edx >> 24 & 1U) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

// __builtin_cpu_supports also checks that the operating system saves the registers.
bool cpu_supports(IsaLevel level) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  switch (level) {
    case IsaLevel::kGeneric:
      return true;
    case IsaLevel::kAvx2:
      return avx2;
    case IsaLevel::kAvx512:
      return avx512;
    case IsaLevel::kAvx512Bf16:
      return avx512_bf16;
    case IsaLevel::kAmxBf16:
      break;
  }
  static const bool amx = request_amx();
  return avx512_bf16 && amx;
}
#else
bool cpu_supports(IsaLevel level) { return level == IsaLevel::kGeneric; }
#endif

}  // namespace minference::cpu

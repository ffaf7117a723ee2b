#include "attention/cpu/kernel_table.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace minference::cpu {

void KeyBatch::add(const std::byte* first_key, std::int64_t key_bytes, const std::byte* first_value,
                   std::int64_t value_bytes, std::int64_t n_keys, const std::uint64_t* words,
                   std::int64_t rows) {
  constexpr std::uint64_t kAll = (1ULL << kKeyGranule) - 1;
  if (words != nullptr && !masked) {
    masked = true;
    for (std::int64_t r = 0; r < rows; ++r) mask[r][0] = mask[r][1] = ~0ULL;
  }
  for (std::int64_t key = 0; key < n_keys; key += kKeyGranule) {
    keys[granules] = first_key + key / kKeyGranule * key_bytes;
    values[granules] =
        first_value == nullptr ? nullptr : first_value + key / kKeyGranule * value_bytes;
    if (masked) {
      const std::int64_t word = granules / 2;
      const std::int64_t at = granules % 2 * kKeyGranule;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::uint64_t bits = words == nullptr ? kAll : words[r] >> key & kAll;
        mask[r][word] = (mask[r][word] & ~(kAll << at)) | bits << at;
      }
    }
    granules += 1;
  }
}

const KernelTable& generic_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& amx_bf16_kernels();
const KernelTable& neon_kernels();
const KernelTable& neon_bf16_kernels();

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
#ifdef MINFERENCE_HAVE_ISA_NEON
    case IsaLevel::kNeon:
      return &neon_kernels();
#endif
#ifdef MINFERENCE_HAVE_ISA_NEON_BF16
    case IsaLevel::kNeonBf16:
      return &neon_bf16_kernels();
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
    default:
      return false;
  }
  static const bool amx = request_amx();
  return avx512_bf16 && amx;
}
#elif defined(__aarch64__)
bool cpu_supports(IsaLevel level) {
  switch (level) {
    case IsaLevel::kGeneric:
    case IsaLevel::kNeon:  // Linux on aarch64 requires it
      return true;
    case IsaLevel::kNeonBf16:
      return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
    default:
      return false;
  }
}
#else
bool cpu_supports(IsaLevel level) { return level == IsaLevel::kGeneric; }
#endif

// Intel's VDPBF16PS is slower than twice the f32 products: on Sapphire Rapids attention reached 125 to
// 150 GFLOP/s with it and 207 without.
bool cpu_prefers([[maybe_unused]] IsaLevel level) {
#ifdef __x86_64__
  return level != IsaLevel::kAvx512Bf16 || !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

}  // namespace minference::cpu

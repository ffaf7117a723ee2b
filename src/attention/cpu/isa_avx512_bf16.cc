// The avx512_bf16 level: products of bf16 pairs with VDPBF16PS, accumulated in f32.
#include "attention/cpu/vec_avx512_bf16.h"

namespace minference::cpu {
namespace {

struct Avx512Bf16Isa : Avx512Bf16Vector {
  using Operand = __m512bh;
  static constexpr std::int64_t kDimAlign = 16;
  static constexpr std::int64_t kStripRows = 4 * kGemmRows;
  static constexpr bool kMatrixUnit = false;

  static void enter() {}
  static void leave() {}

  static Operand load_operand(const Elem* p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
  }
  static Operand broadcast(const Elem* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }

  static void gemm(const RowMajor<Elem>& a, std::int64_t rows, const PackedPanels<Elem>& b,
                   float* c, std::int64_t ldc, bool accumulate) {
    VectorGemm<Avx512Bf16Isa>::gemm(a, rows, b, c, ldc, accumulate);
  }
};

}  // namespace

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = make_kernel_table<Avx512Bf16Isa>(IsaLevel::kAvx512Bf16);
  return table;
}

}  // namespace minference::cpu

// The neon_bf16 level: products of bf16 pairs with BFDOT, accumulated in f32.
#include "attention/cpu/vec_neon.h"

namespace minference::cpu {
namespace {

struct NeonBf16Isa : NeonVector {
  using Elem = std::uint16_t;
  using Operand = bfloat16x8_t;
  static constexpr std::int64_t kPair = 2;
  static constexpr std::int64_t kDimAlign = 16;
  static constexpr std::int64_t kStripRows = 4 * kGemmRows;
  static constexpr bool kMatrixUnit = false;

  static void enter() {}
  static void leave() {}

  static Operand load_operand(const Elem* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
  static Operand broadcast(const Elem* p) {
    std::uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  static Vec dot(Vec sum, Operand a, Operand b) { return vbfdotq_f32(sum, a, b); }

  static Vec exp2(Vec x) { return exp2_polynomial(x, kExp2Coarse); }

  static uint16x8_t round_8(Vec low, Vec high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
  }
  static void to_elements(const float* in, std::int64_t n, Elem* out) {
    for (std::int64_t i = 0; i < n; i += 8) {
      vst1q_u16(out + i, round_8(load(in + i), load(in + i + 4)));
    }
  }
  // out[dim / 2][16][2] = in[16][dim]
  static void transpose_16(const Elem* in, std::int64_t dim, Elem* out) {
    transpose_words_16(in, dim / 2, out);
  }
  // out[16][2] = pairs of (first[i], second[i])
  static void interleave_16(const float* first, const float* second, Elem* out) {
    for (int i = 0; i < 16; i += 8) {
      const uint16x8x2_t pairs = {{round_8(load(first + i), load(first + i + 4)),
                                   round_8(load(second + i), load(second + i + 4))}};
      vst2q_u16(out + 2 * i, pairs);
    }
  }
  template <int kVecs>
  static void store_elements(const Vec (&values)[kVecs], Elem* out) {
    for (int v = 0; v < kVecs; v += 2) {
      vst1q_u16(out + v * kLanes, round_8(values[v], values[v + 1]));
    }
  }
  static void gemm(const RowMajor<Elem>& a, std::int64_t rows, const PackedPanels<Elem>& b,
                   float* c, std::int64_t ldc, bool accumulate) {
    VectorGemm<NeonBf16Isa>::gemm(a, rows, b, c, ldc, accumulate);
  }
};

}  // namespace

const KernelTable& neon_bf16_kernels() {
  static const KernelTable table = make_kernel_table<NeonBf16Isa>(IsaLevel::kNeonBf16);
  return table;
}

}  // namespace minference::cpu

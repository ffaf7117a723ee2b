// NeonVector: four f32 lanes in NEON (AdvSIMD), shared by the levels built on it.
#pragma once

#include <arm_neon.h>

#include "attention/cpu/vec_f32.h"
#include "core/float16.h"

namespace minference::cpu {
namespace {  // each ISA file gets its own copy, compiled with its own flags

struct NeonVector {
  using Vec = float32x4_t;
  static constexpr std::int64_t kLanes = 4;
  // 4 x 4 accumulators, 4 columns, 4 row elements: 24 registers. A fifth row would not divide a row
  // block, and a sixth spills, because compilers load all operands of a step ahead.
  static constexpr int kGemmRows = 4;
  static constexpr int kGemmPanels = 1;

  static Vec zero() { return vdupq_n_f32(0.0F); }
  static Vec set1(float x) { return vdupq_n_f32(x); }
  static Vec load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Vec v) { vst1q_f32(p, v); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }

  static float reduce_max(Vec v) { return vmaxvq_f32(v); }
  static float reduce_add(Vec v) { return vaddvq_f32(v); }
  static bool any_above(Vec v, float bound) { return vmaxvq_u32(vcgtq_f32(v, set1(bound))) != 0; }
  // All bits of lane i set where bit i is.
  static uint32x4_t lane_mask(std::uint64_t bits) {
    constexpr std::uint32_t kLaneBits[4] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(static_cast<std::uint32_t>(bits & 0xFU)), vld1q_u32(kLaneBits));
  }
  static Vec keep_or_minus_infinity(Vec v, std::uint64_t bits) {
    return vbslq_f32(lane_mask(bits), v, set1(-std::numeric_limits<float>::infinity()));
  }
  static Vec keep_or_zero(Vec v, std::uint64_t bits) {
    return vbslq_f32(lane_mask(bits), v, zero());
  }
  // 2^floor(x) * polynomial(x - floor(x)). The clamps return NaN for NaN, and the polynomial keeps
  // it. The power of -127 is encoded as zero and that of 128 as infinity.
  template <int kTerms>
  static Vec exp2_polynomial(Vec x, const float (&coefficients)[kTerms]) {
    x = vminq_f32(set1(128.0F), vmaxq_f32(set1(-127.0F), x));
    const Vec whole = vrndmq_f32(x);
    const Vec fraction = sub(x, whole);
    Vec result = set1(coefficients[kTerms - 1]);
    for (int i = kTerms - 2; i >= 0; --i) result = fma(result, fraction, set1(coefficients[i]));
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127)), 23);
    return mul(result, vreinterpretq_f32_s32(power));
  }
  static Vec exp2_exact(Vec x) { return exp2_polynomial(x, kExp2Exact); }

  static float element_as_f32(const void* row, DType dtype, std::int64_t i) {
    return load_element(row, dtype, i);
  }
  static Vec load_as_f32(const void* row, DType dtype, std::int64_t i) {
    if (dtype == DType::kF32) return load(static_cast<const float*>(row) + i);
    const uint16x4_t half = vld1_u16(static_cast<const std::uint16_t*>(row) + i);
    if (dtype == DType::kF16) return vcvt_f32_f16(vreinterpret_f16_u16(half));
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
  }
};

// Transposes 16 rows of `words` 32-bit words, a multiple of 4, to `words` rows of 16.
inline void transpose_words_16(const void* in, std::int64_t words, void* out) {
  constexpr std::int64_t kWord = 4;
  constexpr std::int64_t kRow = 16 * kWord;
  const auto* from = static_cast<const std::uint8_t*>(in);
  auto* to = static_cast<std::uint8_t*>(out);
  for (std::int64_t w = 0; w < words; w += 4) {
    for (std::int64_t i = 0; i < 16; i += 4) {
      uint32x4_t row[4];
      for (int r = 0; r < 4; ++r) {
        row[r] = vreinterpretq_u32_u8(vld1q_u8(from + ((i + r) * words + w) * kWord));
      }
      uint64x2_t pairs[4];  // of columns 0 and 2, then 1 and 3
      for (int r = 0; r < 2; ++r) {
        pairs[r] = vreinterpretq_u64_u32(vtrn1q_u32(row[2 * r], row[2 * r + 1]));
        pairs[2 + r] = vreinterpretq_u64_u32(vtrn2q_u32(row[2 * r], row[2 * r + 1]));
      }
      std::uint8_t* corner = to + w * kRow + i * kWord;
      for (int c = 0; c < 2; ++c) {
        const uint64x2_t even = vtrn1q_u64(pairs[2 * c], pairs[2 * c + 1]);
        const uint64x2_t odd = vtrn2q_u64(pairs[2 * c], pairs[2 * c + 1]);
        vst1q_u8(corner + c * kRow, vreinterpretq_u8_u64(even));
        vst1q_u8(corner + (c + 2) * kRow, vreinterpretq_u8_u64(odd));
      }
    }
  }
}

}  // namespace
}  // namespace minference::cpu

// Avx512Vector: sixteen f32 lanes in AVX-512 (F, BW, DQ, VL), shared by the levels built on it.
#pragma once

#include <immintrin.h>

#include "attention/cpu/vec_f32.h"
#include "core/float16.h"

namespace minference::cpu {
namespace {  // each ISA file gets its own copy, compiled with its own flags

struct Avx512Vector {
  using Vec = __m512;
  static constexpr std::int64_t kLanes = 16;
  static constexpr int kGemmRows = 8;  // 8 x 2 accumulators, 2 columns, 1 broadcast
  static constexpr int kGemmPanels = 2;

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

  static float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
  static float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
  static bool any_above(Vec v, float bound) {
    return _mm512_cmp_ps_mask(v, set1(bound), _CMP_GT_OQ) != 0;
  }
  static Vec keep_or_minus_infinity(Vec v, std::uint64_t bits) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits),
                                set1(-std::numeric_limits<float>::infinity()), v);
  }
  static Vec keep_or_zero(Vec v, std::uint64_t bits) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), v);
  }
  // scalef multiplies by 2^floor(x) and saturates like the exact result does; the reduction leaves
  // x - floor(x), and 0 for infinities.
  template <int kTerms>
  static Vec exp2_polynomial(Vec x, const float (&coefficients)[kTerms]) {
    const Vec fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec result = set1(coefficients[kTerms - 1]);
    for (int i = kTerms - 2; i >= 0; --i) result = fma(result, fraction, set1(coefficients[i]));
    return _mm512_scalef_ps(result, x);
  }
  static Vec exp2_exact(Vec x) { return exp2_polynomial(x, kExp2Exact); }

  static float element_as_f32(const void* row, DType dtype, std::int64_t i) {
    return load_element(row, dtype, i);
  }
  static Vec load_as_f32(const void* row, DType dtype, std::int64_t i) {
    if (dtype == DType::kF32) return load(static_cast<const float*>(row) + i);
    const __m256i half = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(row) + i));
    if (dtype == DType::kF16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
};

// Transposes a 16 x 16 matrix of 32-bit words, a row per register.
inline void transpose_words_16(__m512i (&row)[16]) {
  __m512i next[16];
  for (int i = 0; i < 16; i += 2) {
    next[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    next[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(next[i], next[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(next[i], next[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(next[i + 1], next[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(next[i + 1], next[i + 3]);
  }
  // Now row[4 g + c] holds, in each 128-bit lane l, column 4 l + c of input rows 4 g ... 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    next[c] = _mm512_shuffle_i32x4(row[c], row[4 + c], 0x88);
    next[4 + c] = _mm512_shuffle_i32x4(row[c], row[4 + c], 0xDD);
    next[8 + c] = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0x88);
    next[12 + c] = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0xDD);
  }
  for (int c = 0; c < 4; ++c) {
    row[c] = _mm512_shuffle_i32x4(next[c], next[8 + c], 0x88);
    row[8 + c] = _mm512_shuffle_i32x4(next[c], next[8 + c], 0xDD);
    row[4 + c] = _mm512_shuffle_i32x4(next[4 + c], next[12 + c], 0x88);
    row[12 + c] = _mm512_shuffle_i32x4(next[4 + c], next[12 + c], 0xDD);
  }
}

// The same in memory: rows of `stride` words to `out_rows` rows of 16, 8 or all.
inline void transpose_words_16(const void* in, std::int64_t stride, void* out, int out_rows) {
  const auto* words = static_cast<const std::int32_t*>(in);
  auto* to = static_cast<std::int32_t*>(out);
  __m512i row[16];
  for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512(words + i * stride);
  transpose_words_16(row);
  // Loops of a known length leave the rows in registers.
  for (int i = 0; i < 8; ++i) _mm512_storeu_si512(to + i * 16, row[i]);
  if (out_rows == 8) return;
  for (int i = 8; i < 16; ++i) _mm512_storeu_si512(to + i * 16, row[i]);
}

}  // namespace
}  // namespace minference::cpu

// Avx512Bf16Vector: conversions and packing of bf16 pairs, shared by the avx512_bf16 and amx levels.
#pragma once

#include "attention/cpu/vec_avx512.h"

namespace minference::cpu {
namespace {  // each ISA file gets its own copy, compiled with its own flags

struct Avx512Bf16Vector : Avx512Vector {
  using Elem = std::uint16_t;
  static constexpr std::int64_t kPair = 2;

  static Vec exp2(Vec x) { return exp2_polynomial(x, kExp2Coarse); }

  static __m512i round_pair(Vec low, Vec high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  static void to_elements(const float* in, std::int64_t n, Elem* out) {
    std::int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      _mm512_storeu_si512(out + i, round_pair(load(in + i), load(in + i + 16)));
    }
    if (i < n) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(in + i))));
    }
  }
  // out[dim / 2][16][2] = in[16][dim]. The last half step reads past a row's end, which the caller's
  // buffer allows, and stores only what belongs to the row.
  static void transpose_16(const Elem* in, std::int64_t dim, Elem* out) {
    for (std::int64_t d = 0; d < dim; d += 32) {
      transpose_words_16(in + d, dim / 2, out + d * 16, d + 32 <= dim ? 16 : 8);
    }
  }
  // Packs 16 whole rows of a multiple of kPackDepth elements without a way through memory.
  static constexpr std::int64_t kPackDepth = 32;
  static void pack_panel(const void* const* rows, DType dtype, std::int64_t dim, Elem* out) {
    if (dtype == DType::kF32) return pack_panel<DType::kF32>(rows, dim, out);
    if (dtype == DType::kF16) return pack_panel<DType::kF16>(rows, dim, out);
    return pack_panel<DType::kBF16>(rows, dim, out);
  }
  template <DType kType>
  static void pack_panel(const void* const* rows, std::int64_t dim, Elem* out) {
    for (std::int64_t d = 0; d < dim; d += kPackDepth) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        if constexpr (kType == DType::kBF16) {
          pairs[i] = _mm512_loadu_si512(static_cast<const Elem*>(rows[i]) + d);
        } else {
          pairs[i] =
              round_pair(load_as_f32(rows[i], kType, d), load_as_f32(rows[i], kType, d + 16));
        }
      }
      transpose_words_16(pairs);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + d * 16 + i * 32, pairs[i]);
    }
  }
  // out[16][2] = pairs of (first[i], second[i])
  static void interleave_16(const float* first, const float* second, Elem* out) {
    const __m512i low =
        _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(first))));
    const __m512i high =
        _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(second))));
    _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  template <int kVecs>
  static void store_elements(const Vec (&values)[kVecs], Elem* out) {
    for (int v = 0; v < kVecs; v += 2) {
      _mm512_storeu_si512(out + v * kLanes, round_pair(values[v], values[v + 1]));
    }
  }
};

}  // namespace
}  // namespace minference::cpu

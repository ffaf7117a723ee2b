// The avx2 level: f32 products with AVX2 and FMA, f16 inputs through F16C.
#include <immintrin.h>

#include "attention/cpu/vec_f32.h"
#include "core/float16.h"

namespace minference::cpu {
namespace {

struct Avx2Vector {
  using Vec = __m256;
  static constexpr std::int64_t kLanes = 8;
  static constexpr int kGemmRows = 6;  // 6 x 2 accumulators, 2 columns, 1 broadcast: 15 registers
  static constexpr int kGemmPanels = 1;

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

  static float reduce_max(Vec v) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
  }
  static float reduce_add(Vec v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static bool any_above(Vec v, float bound) {
    return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(bound), _CMP_GT_OQ)) != 0;
  }
  // All bits of lane i set where bit i is.
  static Vec lane_mask(std::uint64_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i word = _mm256_set1_epi32(static_cast<int>(bits & 0xFFU));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, lane), lane));
  }
  static Vec keep_or_minus_infinity(Vec v, std::uint64_t bits) {
    return _mm256_blendv_ps(set1(-std::numeric_limits<float>::infinity()), v, lane_mask(bits));
  }
  static Vec keep_or_zero(Vec v, std::uint64_t bits) { return _mm256_and_ps(v, lane_mask(bits)); }
  // 2^floor(x) * polynomial(x - floor(x)). max and min return their second operand when one is NaN,
  // so a NaN score comes out as NaN.
  static Vec exp2_exact(Vec x) {
    x = _mm256_min_ps(set1(128.0F), _mm256_max_ps(set1(-127.0F), x));
    const Vec whole = _mm256_floor_ps(x);
    const Vec fraction = sub(x, whole);
    Vec result = set1(kExp2Exact[6]);
    for (int i = 5; i >= 0; --i) result = fma(result, fraction, set1(kExp2Exact[i]));
    const __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return mul(result, _mm256_castsi256_ps(power));
  }

  static float element_as_f32(const void* row, DType dtype, std::int64_t i) {
    return load_element(row, dtype, i);
  }
  static Vec load_as_f32(const void* row, DType dtype, std::int64_t i) {
    if (dtype == DType::kF32) return load(static_cast<const float*>(row) + i);
    const __m128i half = _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(row) + i));
    if (dtype == DType::kF16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
};

}  // namespace

const KernelTable& avx2_kernels() {
  static const KernelTable table = make_kernel_table<F32Isa<Avx2Vector>>(IsaLevel::kAvx2);
  return table;
}

}  // namespace minference::cpu

// The generic level: portable vectors of four floats, which every compiler maps to what it has.
#include <bit>

#include "attention/cpu/vec_f32.h"
#include "core/float16.h"

namespace minference::cpu {
namespace {

struct GenericVector {
  using Vec = float __attribute__((vector_size(16)));
  using IntVec = std::int32_t __attribute__((vector_size(16)));
  static constexpr std::int64_t kLanes = 4;
  static constexpr int kGemmRows = 2;  // 2 x 4 accumulators leave room in 16 registers
  static constexpr int kGemmPanels = 1;

  static Vec zero() { return Vec{}; }
  static Vec set1(float x) { return Vec{x, x, x, x}; }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }

  static float reduce_max(Vec v) { return std::max(std::max(v[0], v[1]), std::max(v[2], v[3])); }
  static float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static bool any_above(Vec v, float bound) {
    return v[0] > bound || v[1] > bound || v[2] > bound || v[3] > bound;
  }
  // All bits of lane i set where bit i is.
  static IntVec lane_mask(std::uint64_t bits) {
    const IntVec lane{1, 2, 4, 8};
    const auto low = static_cast<std::int32_t>(bits & 0xFU);
    return (IntVec{low, low, low, low} & lane) != 0;
  }
  static Vec keep_or_minus_infinity(Vec v, std::uint64_t bits) {
    return lane_mask(bits) ? v : set1(-std::numeric_limits<float>::infinity());
  }
  static Vec keep_or_zero(Vec v, std::uint64_t bits) { return lane_mask(bits) ? v : zero(); }
  // 2^floor(x) * polynomial(x - floor(x)); NaN stays NaN because comparisons with it are false.
  static Vec exp2_exact(Vec x) {
    x = set1(-127.0F) > x ? set1(-127.0F) : x;
    x = set1(128.0F) < x ? set1(128.0F) : x;
    IntVec whole = __builtin_convertvector(x, IntVec);
    whole += __builtin_convertvector(whole, Vec) > x;  // truncation to floor; true is -1
    const Vec fraction = x - __builtin_convertvector(whole, Vec);
    Vec result = set1(kExp2Exact[6]);
    for (int i = 5; i >= 0; --i) result = result * fraction + kExp2Exact[i];
    const IntVec power = (whole + 127) << 23;
    return result * std::bit_cast<Vec>(power);
  }

  static float element_as_f32(const void* row, DType dtype, std::int64_t i) {
    return load_element(row, dtype, i);
  }
  static Vec load_as_f32(const void* row, DType dtype, std::int64_t i) {
    return Vec{load_element(row, dtype, i), load_element(row, dtype, i + 1),
               load_element(row, dtype, i + 2), load_element(row, dtype, i + 3)};
  }
};

}  // namespace

const KernelTable& generic_kernels() {
  static const KernelTable table = make_kernel_table<F32Isa<GenericVector>>(IsaLevel::kGeneric);
  return table;
}

}  // namespace minference::cpu

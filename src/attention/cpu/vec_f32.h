// F32Isa: what every level that computes in f32 shares, on top of its vector trait.
#pragma once

#include <cstring>

#include "attention/cpu/tile_kernels.h"

namespace minference::cpu {

// Turns a vector trait into an ISA for TileKernels whose packed elements are f32.
template <class Vector>
struct F32Isa : Vector {
  using Elem = float;
  using Operand = typename Vector::Vec;
  static constexpr std::int64_t kPair = 1;
  static constexpr std::int64_t kDimAlign = 16;
  static constexpr std::int64_t kStripRows = 4 * Vector::kGemmRows;
  static constexpr bool kMatrixUnit = false;

  static void enter() {}
  static void leave() {}

  static Operand load_operand(const Elem* p) { return Vector::load(p); }
  static Operand broadcast(const Elem* p) { return Vector::set1(*p); }
  static typename Vector::Vec dot(typename Vector::Vec sum, Operand a, Operand b) {
    return Vector::fma(a, b, sum);
  }
  static typename Vector::Vec exp2(typename Vector::Vec x) { return Vector::exp2_exact(x); }

  static void to_elements(const float* in, std::int64_t n, Elem* out) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(float));
  }
  // out[d][16] = in[16][d]
  static void transpose_16(const Elem* in, std::int64_t dim, Elem* out) {
    for (std::int64_t d = 0; d < dim; ++d) {
      for (std::int64_t i = 0; i < kPanelWidth; ++i) out[d * kPanelWidth + i] = in[i * dim + d];
    }
  }
  static void interleave_16(const float* values, const float*, Elem* out) {
    std::memcpy(out, values, kPanelWidth * sizeof(float));
  }
  template <int kVecs>
  static void store_elements(const typename Vector::Vec (&values)[kVecs], Elem* out) {
    for (int v = 0; v < kVecs; ++v) Vector::store(out + v * Vector::kLanes, values[v]);
  }
  static void gemm(const RowMajor<Elem>& a, std::int64_t rows, const PackedPanels<Elem>& b,
                   float* c, std::int64_t ldc, bool accumulate) {
    VectorGemm<F32Isa>::gemm(a, rows, b, c, ldc, accumulate);
  }
};

// Minimax coefficients of 2^x on [0, 1) by relative error, constant term first: about 2e-9 before
// rounding (f32 results) and 7e-5 (results that are rounded to bf16 next, whose unit is 4e-3).
inline constexpr float kExp2Exact[7] = {1.0F,         0.693147F,     0.24022983F,   0.05548334F,
                                        0.009678841F, 0.0012439688F, 0.00021702255F};
inline constexpr float kExp2Coarse[4] = {0.9999252F, 0.69583356F, 0.22606716F, 0.07802452F};

}  // namespace minference::cpu

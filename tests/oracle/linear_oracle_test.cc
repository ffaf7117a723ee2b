// linear() against products in fp64, on every ISA level.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/float16.h"
#include "minference/error.h"
#include "minference/linear.h"

namespace minference {
namespace {

struct Matrix {
  std::int64_t rows;
  std::int64_t cols;
  std::vector<float> values;
};

void unpack_f32(const void* context, std::int64_t row, std::int64_t begin, std::int64_t count,
                float* out) {
  const auto& matrix = *static_cast<const Matrix*>(context);
  const float* from = matrix.values.data() + row * matrix.cols + begin;
  std::copy(from, from + count, out);
}

LinearWeight weight_of(const Matrix& matrix) {
  return {matrix.rows, matrix.cols, unpack_f32, &matrix};
}

template <class Draw>
Matrix random_matrix(std::int64_t rows, std::int64_t cols, Draw&& draw) {
  Matrix matrix{rows, cols, std::vector<float>(rows * cols)};
  for (float& value : matrix.values) value = draw();
  return matrix;
}

double exact(const Matrix& a, const Matrix& w, std::int64_t m, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t k = 0; k < a.cols; ++k) {
    sum += static_cast<double>(a.values[m * a.cols + k]) * w.values[n * w.cols + k];
  }
  return sum;
}

// The last is deeper than one slice at every level.
constexpr std::int64_t kShapes[][3] = {  // tokens, weight rows, weight cols
    {1, 1, 1},     {1, 64, 256},    {2, 15, 17},     {63, 64, 255},  {64, 64, 257}, {65, 129, 64},
    {17, 100, 40}, {130, 192, 576}, {128, 48, 1000}, {100, 16, 513}, {3, 33, 33100}};

// Small integers are exact in bf16 and their sums exact in f32: every level must agree to the bit,
// and no element outside c[tokens][rows] may be written.
TEST(LinearOracle, SmallIntegersAreExact) {
  std::mt19937 random(7);
  const auto draw = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
  for (const auto& [tokens, rows, cols] : kShapes) {
    const Matrix a = random_matrix(tokens, cols, draw);
    const Matrix w = random_matrix(rows, cols, draw);
    const std::int64_t stride = rows + 3;
    for (const IsaLevel level : available_isa_levels()) {
      for (const int threads : {1, 3}) {
        std::vector<float> c(tokens * stride, -1234.0F);
        linear_cpu(a.values.data(), cols, tokens, weight_of(w), c.data(), stride, level, threads);
        for (std::int64_t m = 0; m < tokens; ++m) {
          for (std::int64_t n = 0; n < stride; ++n) {
            const double expected = n < rows ? exact(a, w, m, n) : -1234.0;
            ASSERT_EQ(c[m * stride + n], expected)
                << isa_name(level) << ", " << threads << " threads, " << tokens << " x " << rows
                << " x " << cols << ", element " << m << ", " << n;
          }
        }
      }
    }
  }
}

// The bound is the rounding of the operands, which is all that a level may add: 2^-8 a product for
// both factors in bf16 (half a unit each), 2^-20 for f32 sums of up to 1000 terms.
TEST(LinearOracle, ErrorStaysWithinOperandRounding) {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return normal(random); };
  for (const auto& [tokens, rows, cols] : kShapes) {
    const Matrix a = random_matrix(tokens, cols, draw);
    const Matrix w = random_matrix(rows, cols, draw);
    for (const IsaLevel level : available_isa_levels()) {
      std::vector<float> c(tokens * rows);
      linear_cpu(a.values.data(), cols, tokens, weight_of(w), c.data(), rows, level, 2);
      for (std::int64_t m = 0; m < tokens; ++m) {
        for (std::int64_t n = 0; n < rows; ++n) {
          double magnitude = 0.0;
          for (std::int64_t k = 0; k < cols; ++k) {
            magnitude +=
                std::abs(static_cast<double>(a.values[m * cols + k]) * w.values[n * cols + k]);
          }
          const double bound = magnitude * (isa_is_bf16(level) ? 0x1p-8 : 0x1p-20);
          ASSERT_NEAR(c[m * rows + n], exact(a, w, m, n), bound) << isa_name(level);
        }
      }
    }
  }
}

TEST(LinearOracle, NanInAnActivationReachesItsRowOnly) {
  Matrix a{3, 40, std::vector<float>(3 * 40, 1.0F)};
  a.values[40 + 7] = std::numeric_limits<float>::quiet_NaN();
  const Matrix w{20, 40, std::vector<float>(20 * 40, 1.0F)};
  for (const IsaLevel level : available_isa_levels()) {
    std::vector<float> c(3 * 20);
    linear_cpu(a.values.data(), 40, 3, weight_of(w), c.data(), 20, level, 1);
    for (std::int64_t n = 0; n < 20; ++n) {
      EXPECT_EQ(c[n], 40.0F);
      EXPECT_TRUE(std::isnan(c[20 + n]));
      EXPECT_EQ(c[40 + n], 40.0F);
    }
  }
}

TEST(LinearOracle, RefusesBadSizes) {
  const Matrix w{4, 8, std::vector<float>(32)};
  std::vector<float> a(8);
  std::vector<float> c(4);
  const auto call = [&](std::int64_t a_stride, std::int64_t tokens, LinearWeight weight,
                        std::int64_t c_stride) {
    linear(a.data(), a_stride, tokens, weight, c.data(), c_stride, Precision::kAuto, 1);
  };
  EXPECT_NO_THROW(call(8, 1, weight_of(w), 4));
  EXPECT_THROW(call(7, 1, weight_of(w), 4), InvalidArgument);
  EXPECT_THROW(call(8, 0, weight_of(w), 4), InvalidArgument);
  EXPECT_THROW(call(8, 1, weight_of(w), 3), InvalidArgument);
  EXPECT_THROW(call(8, 1, LinearWeight{4, 8, nullptr, nullptr}, 4), InvalidArgument);
}

}  // namespace
}  // namespace minference

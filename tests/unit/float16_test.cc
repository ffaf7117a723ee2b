#include "core/float16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace minference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Float16, EveryHalfSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = f16_to_f32(half);
    if (std::isnan(value)) {
      EXPECT_GT(bits & 0x7FFFU, 0x7C00U) << bits;
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(value)))) << bits;
      EXPECT_EQ(f32_to_f16(value) & 0x8000, half & 0x8000) << bits;
    } else {
      EXPECT_EQ(f32_to_f16(value), half) << bits;
    }
  }
}

TEST(Float16, EveryBrainFloatSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto brain = static_cast<std::uint16_t>(bits);
    const float value = bf16_to_f32(brain);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(value)))) << bits;
      EXPECT_EQ(f32_to_bf16(value) & 0x8000, brain & 0x8000) << bits;
    } else {
      EXPECT_EQ(f32_to_bf16(value), brain) << bits;
    }
  }
}

TEST(Float16, KnownHalves) {
  EXPECT_EQ(f16_to_f32(0x3C00), 1.0F);
  EXPECT_EQ(f16_to_f32(0xC000), -2.0F);
  EXPECT_EQ(f16_to_f32(0x7BFF), 65504.0F);
  EXPECT_EQ(f16_to_f32(0x0400), 0x1p-14F);
  EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24F);
  EXPECT_EQ(f16_to_f32(0x7C00), kInfinity);
  EXPECT_EQ(f16_to_f32(0xFC00), -kInfinity);
  EXPECT_TRUE(std::signbit(f16_to_f32(0x8000)));
}

TEST(Float16, EdgesOfHalf) {
  EXPECT_EQ(f32_to_f16(65519.996F), 0x7BFF);  // just below the tie with 2^16
  EXPECT_EQ(f32_to_f16(65520.0F), 0x7C00);    // the tie goes to even, which is infinity
  EXPECT_EQ(f32_to_f16(-1e30F), 0xFC00);
  EXPECT_EQ(f32_to_f16(0x1p-25F), 0x0000);    // tie between 0 and the smallest subnormal
  EXPECT_EQ(f32_to_f16(0x1.8p-24F), 0x0002);  // tie between two subnormals
  EXPECT_EQ(f32_to_f16(0x1.000002p-25F), 0x0001);
  EXPECT_EQ(f32_to_f16(0x1.FFFp-15F), 0x0400);  // the largest subnormal rounds up to a normal
  EXPECT_EQ(f32_to_f16(-0.0F), 0x8000);
  EXPECT_EQ(f32_to_f16(0x1p-149F), 0x0000);
}

TEST(Float16, EdgesOfBrainFloat) {
  EXPECT_EQ(f32_to_bf16(1.0F), 0x3F80);
  EXPECT_EQ(f32_to_bf16(0x1.01p0F), 0x3F80);      // tie, down to even
  EXPECT_EQ(f32_to_bf16(0x1.03p0F), 0x3F82);      // tie, up to even
  EXPECT_EQ(f32_to_bf16(0x1.010002p0F), 0x3F81);  // just above the tie
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(f32_to_bf16(-kInfinity), 0xFF80);
  // A NaN whose payload lies only in the bits that are cut off must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7F800001U)))));
}

// The nearest of the 16-bit neighbours, ties to the even one, judged in doubles.
template <class ToFloat>
void expect_nearest(float value, std::uint16_t result, ToFloat to_float) {
  const double distance = std::abs(static_cast<double>(to_float(result)) - value);
  for (const int step : {-1, 1}) {
    const auto neighbour = static_cast<std::uint16_t>(result + step);
    const double other = std::abs(static_cast<double>(to_float(neighbour)) - value);
    if (std::isnan(other) || std::isinf(other)) continue;
    EXPECT_LE(distance, other) << value;
    if (distance == other) {
      EXPECT_EQ(result % 2, 0) << value;
    }
  }
}

TEST(Float16, RoundsToNearestEven) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> exponent(-27, 16);
  std::uniform_real_distribution<float> mantissa(1, 2);
  for (int i = 0; i < 200000; ++i) {
    const float sign = random() % 2 == 0 ? 1.0F : -1.0F;
    const float value = sign * mantissa(random) * std::exp2(std::floor(exponent(random)));
    if (std::abs(value) < 65504) expect_nearest(value, f32_to_f16(value), f16_to_f32);
    expect_nearest(value, f32_to_bf16(value), bf16_to_f32);
  }
}

TEST(Float16, ElementAccessFollowsTheType) {
  float f32[2] = {0, 0};
  std::uint16_t half[2] = {0, 0};
  store_element(f32, DType::kF32, 1, 1.1F);
  EXPECT_EQ(f32[1], 1.1F);
  EXPECT_EQ(load_element(f32, DType::kF32, 1), 1.1F);
  store_element(half, DType::kF16, 1, 1.5F);
  EXPECT_EQ(half[1], 0x3E00);
  EXPECT_EQ(load_element(half, DType::kF16, 1), 1.5F);
  store_element(half, DType::kBF16, 1, 1.5F);
  EXPECT_EQ(half[1], 0x3FC0);
  EXPECT_EQ(load_element(half, DType::kBF16, 1), 1.5F);
  EXPECT_EQ(half[0], 0);
}

}  // namespace
}  // namespace minference

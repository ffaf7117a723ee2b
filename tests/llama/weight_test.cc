// Unpackers of weight formats and products over them, against ggml's own conversion.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ggml.h"
#include "llama/ggml_weight.h"
#include "llama/plugin_linear.h"

namespace minference::llama_host {
namespace {

constexpr std::int64_t kRows = 5;
constexpr std::int64_t kCols = 768;

std::vector<ggml_type> supported_types() {
  std::vector<ggml_type> types;
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    if (weight_format(static_cast<ggml_type>(type))) types.push_back(static_cast<ggml_type>(type));
  }
  return types;
}

// A weight tensor of random values, and what ggml unpacks from it.
struct Weight {
  ggml_context* context = ggml_init({1 << 20, nullptr, false});
  ggml_tensor* tensor;
  std::vector<float> expected;

  explicit Weight(ggml_type type) : expected(kRows * kCols) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> values(kRows * kCols);
    for (float& value : values) value = normal(random);
    tensor = ggml_new_tensor_2d(context, type, kCols, kRows);
    if (type == GGML_TYPE_F32) {
      std::memcpy(tensor->data, values.data(), ggml_nbytes(tensor));
      expected = values;
      return;
    }
    ggml_quantize_chunk(type, values.data(), tensor->data, 0, kRows, kCols, nullptr);
    ggml_get_type_traits(type)->to_float(tensor->data, expected.data(), kRows * kCols);
  }
  ~Weight() { ggml_free(context); }
};

TEST(Weights, EveryFormatHasTheSizesOfGgml) {
  EXPECT_EQ(supported_types().size(), 11U);
  for (const ggml_type type : supported_types()) {
    EXPECT_EQ(block_elements(*weight_format(type)), ggml_blck_size(type)) << ggml_type_name(type);
    EXPECT_EQ(block_bytes(*weight_format(type)), ggml_type_size(type)) << ggml_type_name(type);
  }
  EXPECT_FALSE(weight_format(GGML_TYPE_IQ4_XS));
}

// The compiler may fuse d * q - m into one rounding: a unit of the larger term, no more.
TEST(Weights, UnpackedValuesAreThoseOfGgml) {
  for (const ggml_type type : supported_types()) {
    const Weight weight(type);
    for (const IsaLevel level : available_isa_levels()) {
      const GgmlWeight ours(weight.tensor, *weight_format(type), level);
      const LinearWeight linear = ours.linear_weight();
      for (std::int64_t row = 0; row < kRows; ++row) {
        for (std::int64_t begin = 0; begin < kCols; begin += LinearWeight::kUnpackChunk) {
          std::vector<float> chunk(LinearWeight::kUnpackChunk);
          linear.unpack(linear.context, row, begin, LinearWeight::kUnpackChunk, chunk.data());
          for (std::int64_t i = 0; i < LinearWeight::kUnpackChunk; ++i) {
            ASSERT_NEAR(chunk[i], weight.expected[row * kCols + begin + i], 1e-6)
                << ggml_type_name(type) << ", " << isa_name(level) << ", row " << row << ", column "
                << begin + i;
          }
        }
      }
    }
  }
}

TEST(Weights, ProductsAreThoseOfTheUnpackedWeight) {
  constexpr std::int64_t kTokens = 70;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<float> activations(kTokens * kCols);
  for (float& value : activations) value = normal(random);
  for (const ggml_type type : supported_types()) {
    const Weight weight(type);
    for (const IsaLevel level : available_isa_levels()) {
      const GgmlWeight ours(weight.tensor, *weight_format(type), level);
      std::vector<float> out(kTokens * kRows);
      linear_cpu(activations.data(), kCols, kTokens, ours.linear_weight(), out.data(), kRows, level,
                 2);
      for (std::int64_t m = 0; m < kTokens; ++m) {
        for (std::int64_t n = 0; n < kRows; ++n) {
          double sum = 0;
          double magnitude = 0;
          for (std::int64_t k = 0; k < kCols; ++k) {
            const double term =
                static_cast<double>(activations[m * kCols + k]) * weight.expected[n * kCols + k];
            sum += term;
            magnitude += std::abs(term);
          }
          // Half a unit of bf16 for each operand, or of f32 for the sum.
          ASSERT_NEAR(out[m * kRows + n], sum, magnitude * (isa_is_bf16(level) ? 0x1p-8 : 0x1p-20))
              << ggml_type_name(type) << ", " << isa_name(level);
        }
      }
    }
  }
}

// What the scheduler may hand over: weights only, whole prompts only, and nothing that another
// operation computed.
TEST(Weights, OnlyProductsOfWeightsAreTaken) {
  const IsaLevel level = IsaLevel::kAvx512Bf16;
  ggml_backend_buffer_type own_type{};
  ggml_backend_buffer buffer{};
  buffer.buft = &own_type;
  buffer.usage = GGML_BACKEND_BUFFER_USAGE_ANY;
  ggml_context* context = ggml_init({1 << 20, nullptr, true});
  ggml_tensor* weight = ggml_new_tensor_2d(context, GGML_TYPE_Q8_0, 512, 256);
  ggml_tensor* k_quant = ggml_new_tensor_2d(context, GGML_TYPE_Q4_K, 512, 256);
  k_quant->buffer = &buffer;
  const auto product = [&](ggml_tensor* left, std::int64_t tokens) {
    return ggml_mul_mat(context, left, ggml_new_tensor_2d(context, GGML_TYPE_F32, 512, tokens));
  };
  EXPECT_FALSE(takes_linear(product(weight, 512), level, &own_type)) << "no buffer yet";
  weight->buffer = &buffer;
  // While loading: both are kept in plain layout, on machines where that is the faster one.
  EXPECT_TRUE(takes_linear(product(weight, 512), level, &own_type));
  EXPECT_TRUE(takes_linear(product(k_quant, 512), level, &own_type));
  EXPECT_FALSE(takes_linear(product(weight, 512), IsaLevel::kGeneric, &own_type));
  ggml_backend_buffer_type other_type{};
  buffer.buft = &other_type;
  EXPECT_FALSE(takes_linear(product(weight, 512), level, &own_type)) << "a computed operand";

  buffer.usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
  EXPECT_TRUE(takes_linear(product(weight, 512), level, &own_type));
  EXPECT_TRUE(takes_linear(product(weight, 64), level, &own_type));
  EXPECT_FALSE(takes_linear(product(weight, 63), level, &own_type));
  EXPECT_FALSE(takes_linear(product(k_quant, 512), level, &own_type)) << "ggml is faster";
  EXPECT_TRUE(takes_linear(product(k_quant, 512), IsaLevel::kAmxBf16, &own_type));
  EXPECT_FALSE(takes_linear(product(weight, 512), IsaLevel::kGeneric, &own_type));
  ggml_set_name(weight, "output.weight");
  EXPECT_FALSE(takes_linear(product(weight, 512), level, &own_type));

  ggml_tensor* foreign = ggml_new_tensor_2d(context, GGML_TYPE_IQ4_XS, 512, 256);
  foreign->buffer = &buffer;
  EXPECT_FALSE(takes_linear(product(foreign, 512), level, &own_type));
  ggml_tensor* experts = ggml_new_tensor_3d(context, GGML_TYPE_Q8_0, 512, 256, 2);
  experts->buffer = &buffer;
  EXPECT_FALSE(takes_linear(
      ggml_mul_mat(context, experts, ggml_new_tensor_3d(context, GGML_TYPE_F32, 512, 512, 2)),
      level, &own_type));
  ggml_free(context);
}

}  // namespace
}  // namespace minference::llama_host

#include "minference/tensor.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/checked.h"
#include "minference/error.h"

namespace minference {
namespace {

TEST(Tensor, TypesHaveNamesAndSizes) {
  EXPECT_EQ(dtype_size(DType::kF32), 4);
  EXPECT_EQ(dtype_size(DType::kF16), 2);
  EXPECT_EQ(dtype_size(DType::kBF16), 2);
  EXPECT_STREQ(dtype_name(DType::kF32), "f32");
  EXPECT_STREQ(dtype_name(DType::kF16), "f16");
  EXPECT_STREQ(dtype_name(DType::kBF16), "bf16");
}

TEST(Tensor, ContiguousStrides) {
  float data[120] = {};
  const TensorView view = TensorView::contiguous(data, DType::kF32, {2, 3, 4, 5});
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(view.batch(), 2);
  EXPECT_EQ(view.tokens(), 3);
  EXPECT_EQ(view.heads(), 4);
  EXPECT_EQ(view.dim(), 5);
  EXPECT_EQ(view.row(1, 2, 3), data + 60 + 40 + 15);
  EXPECT_FALSE(view.empty());
  EXPECT_TRUE(TensorView().empty());
}

TEST(Tensor, RowsHonourAnyStride) {
  std::uint16_t data[64] = {};
  TensorView view;
  view.data = data + 32;
  view.dtype = DType::kBF16;
  view.shape = {2, 4, 2, 3};
  view.strides = {0, -8, 3, 1};  // a broadcast batch, tokens stored backwards
  EXPECT_EQ(view.row(0, 2, 1), data + 32 - 16 + 3);
  EXPECT_EQ(view.row(1, 2, 1), view.row(0, 2, 1));
}

TEST(Tensor, ContiguousRefusesImpossibleSizes) {
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::kF32, {1, -1, 1, 1}), InvalidArgument);
  const std::int64_t huge = std::int64_t{1} << 32;
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::kF32, {1, huge, huge, 1}), InvalidArgument);
}

TEST(Checked, ReturnsWhatFits) {
  EXPECT_EQ(checked_mul(-3, 7, "x"), -21);
  EXPECT_EQ(checked_add(-3, 7, "x"), 4);
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(checked_mul(largest, 1, "x"), largest);
  EXPECT_EQ(checked_add(largest, 0, "x"), largest);
}

TEST(Checked, NamesWhatDoesNot) {
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  try {
    checked_mul(largest, 2, "the size");
    FAIL() << "no exception";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "the size overflows 64 bits: 9223372036854775807 * 2");
  }
  EXPECT_THROW(checked_add(largest, 1, "x"), InvalidArgument);
  EXPECT_THROW(checked_add(-largest, -2, "x"), InvalidArgument);
}

}  // namespace
}  // namespace minference

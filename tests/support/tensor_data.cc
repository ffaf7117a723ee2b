#include "support/tensor_data.h"

#include <algorithm>

#include "core/float16.h"

namespace minference::test {
namespace {

// Strides of a layout, in elements. Gaps are odd, so rows are not even aligned to their own size.
std::array<std::int64_t, 4> layout_strides(const std::array<std::int64_t, 4>& shape,
                                           Layout layout) {
  const auto [batch, tokens, heads, dim] = shape;
  switch (layout) {
    case Layout::kPacked:
      break;
    case Layout::kPaddedRows: {
      const std::int64_t head = dim + 3;
      const std::int64_t token = heads * head + 5;
      return {tokens * token + 7, token, head, 1};
    }
    case Layout::kHeadMajor: {
      const std::int64_t token = dim + 1;
      const std::int64_t head = tokens * token + 3;
      return {heads * head + 9, token, head, 1};
    }
  }
  return {tokens * heads * dim, heads * dim, dim, 1};
}

}  // namespace

TensorData::TensorData(const std::array<std::int64_t, 4>& shape, DType dtype, Layout layout) {
  view_.dtype = dtype;
  view_.shape = shape;
  view_.strides = layout_strides(shape, layout);
  std::int64_t elements = 1;  // the last element is the last of the buffer: no gap behind it
  for (int axis = 0; axis < 4; ++axis) {
    if (shape[axis] == 0) return;
    elements += (shape[axis] - 1) * view_.strides[axis];
  }
  buffer_ = GuardedBuffer(elements * dtype_size(dtype) / 2);
  view_.data = buffer_.data();
}

float TensorData::get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const {
  return load_element(view_.row(b, t, h), view_.dtype, d);
}

void TensorData::set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value) {
  store_element(view_.row(b, t, h), view_.dtype, d, value);
}

std::vector<float> TensorData::values() const {
  std::vector<float> result;
  for (std::int64_t b = 0; b < view_.batch(); ++b) {
    for (std::int64_t t = 0; t < view_.tokens(); ++t) {
      for (std::int64_t h = 0; h < view_.heads(); ++h) {
        for (std::int64_t d = 0; d < view_.dim(); ++d) result.push_back(get(b, t, h, d));
      }
    }
  }
  return result;
}

void TensorData::poison_row(std::int64_t b, std::int64_t t, std::int64_t h) {
  const std::int64_t words = view_.dim() * dtype_size(view_.dtype) / 2;
  std::fill_n(static_cast<std::uint16_t*>(view_.row(b, t, h)), words, kPoison);
}

bool TensorData::all_poison() const {
  return std::all_of(buffer_.data(), buffer_.data() + buffer_.words(),
                     [](std::uint16_t word) { return word == kPoison; });
}

}  // namespace minference::test

// TensorData: an owned tensor in one of several memory layouts, poisoned where it has no element.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "minference/tensor.h"
#include "support/guarded_buffer.h"

namespace minference::test {

enum class Layout {
  kPacked,      // [batch][tokens][heads][dim], no gaps
  kPaddedRows,  // the same with a gap of odd size behind every dim, heads and tokens extent
  kHeadMajor,   // [batch][heads][tokens][dim] with gaps
};

class TensorData {
 public:
  TensorData() = default;
  TensorData(const std::array<std::int64_t, 4>& shape, DType dtype, Layout layout);

  const TensorView& view() const { return view_; }
  float get(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const;
  void set(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d, float value);

  // Every element in the order [batch][tokens][heads][dim].
  std::vector<float> values() const;

  // Makes element [b, t, h, :] poison again.
  void poison_row(std::int64_t b, std::int64_t t, std::int64_t h);
  // True when nothing but poison is left anywhere.
  bool all_poison() const;

 private:
  GuardedBuffer buffer_;
  TensorView view_;
};

}  // namespace minference::test

// Non-owning strided views of tensors: data pointer, dtype, shape, strides and device, nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace minference {

enum class DType : std::uint8_t { kF32, kF16, kBF16 };

// Bytes of one element.
std::int64_t dtype_size(DType dtype);
// "f32", "f16" or "bf16".
const char* dtype_name(DType dtype);

// Where memory lies.
struct Device {
  enum class Kind : std::uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int ordinal = 0;  // number of the CUDA device

  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu" or "cuda:<ordinal>".
std::string device_name(Device device);

// A view of a 4-d tensor. Strides are in elements and may be any value, 0 and negative included;
// every attention tensor uses the axis order [batch, tokens, heads, dim]. The dim axis must be
// contiguous (stride 1) unless its extent is 1.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};
  Device device;

  bool empty() const { return data == nullptr; }
  std::int64_t batch() const { return shape[0]; }
  std::int64_t tokens() const { return shape[1]; }
  std::int64_t heads() const { return shape[2]; }
  std::int64_t dim() const { return shape[3]; }

  // Address of element [b, t, h, 0].
  void* row(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return static_cast<char*>(data) +
           (b * strides[0] + t * strides[1] + h * strides[2]) * dtype_size(dtype);
  }

  // A densely packed view of `data` with the given shape.
  static TensorView contiguous(void* data, DType dtype, const std::array<std::int64_t, 4>& shape,
                               Device device = {});
};

}  // namespace minference

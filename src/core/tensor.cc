#include "minference/tensor.h"

#include "core/checked.h"

namespace minference {

std::int64_t dtype_size(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

std::string device_name(Device device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : "cuda:" + std::to_string(device.ordinal);
}

TensorView TensorView::contiguous(void* data, DType dtype, const std::array<std::int64_t, 4>& shape,
                                  Device device) {
  TensorView view;
  view.data = data;
  view.device = device;
  view.dtype = dtype;
  view.shape = shape;
  std::int64_t stride = 1;
  for (int axis = 3; axis >= 0; --axis) {
    if (shape[axis] < 0) {
      throw InvalidArgument("extent of axis " + std::to_string(axis) + " is " +
                            std::to_string(shape[axis]) + "; legal: 0 or more");
    }
    view.strides[axis] = stride;
    stride = checked_mul(stride, shape[axis], "the size of a tensor");
  }
  return view;
}

}  // namespace minference

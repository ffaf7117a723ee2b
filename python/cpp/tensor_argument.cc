#include "tensor_argument.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/validate.h"
#include "core/float16.h"
#include "minference/error.h"
#include "minference/tensor.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

using ReadOnlyArray = nb::ndarray<nb::ro>;
using WritableArray = nb::ndarray<>;

std::string dtype_text(const nb::dlpack::dtype& dtype) {
  static constexpr const char* kCodes[] = {"int",    "uint",    "float", "opaque",
                                           "bfloat", "complex", "bool"};
  std::string text = dtype.code < std::size(kCodes)
                         ? kCodes[dtype.code]
                         : "dtype code " + std::to_string(dtype.code) + ", bits ";
  if (dtype.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bool)) {
    text += std::to_string(dtype.bits);
  }
  return dtype.lanes == 1 ? text : text + " x " + std::to_string(dtype.lanes);
}

bool is(const nb::dlpack::dtype& dtype, nb::dlpack::dtype_code code) {
  return dtype.code == static_cast<std::uint8_t>(code) && dtype.lanes == 1;
}

DType tensor_dtype(const std::string& name, const nb::dlpack::dtype& dtype) {
  if (is(dtype, nb::dlpack::dtype_code::Float) && dtype.bits == 32) return DType::kF32;
  if (is(dtype, nb::dlpack::dtype_code::Float) && dtype.bits == 16) return DType::kF16;
  if (is(dtype, nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16) return DType::kBF16;
  throw InvalidArgument(name + " has dtype " + dtype_text(dtype) +
                        "; legal: float32, float16, bfloat16");
}

ReadOnlyArray import_array(const std::string& name, nb::handle object) {
  ReadOnlyArray array;
  if (!nb::try_cast(object, array)) {
    throw InvalidArgument(name + " is a " + nb::type_name(object.type()).c_str() +
                          " that does not give its memory; legal: a tensor that DLPack or the "
                          "buffer protocol can export, such as a NumPy array or a torch tensor");
  }
  return array;
}

WritableArray import_writable(const std::string& name, nb::handle object) {
  WritableArray array;
  if (!nb::try_cast(object, array)) {
    import_array(name, object);  // not a tensor at all: says so
    throw InvalidArgument(name + " is read-only; legal: a writable tensor");
  }
  return array;
}

template <typename Array>
Device device_of(const std::string& name, const Array& array) {
  if (array.device_type() == nb::device::cpu::value) return {};
  if (array.device_type() == nb::device::cuda::value) {
    return {Device::Kind::kCuda, array.device_id()};
  }
  throw Unsupported(name + " is on a device of DLPack's type " +
                    std::to_string(array.device_type()) +
                    "; minference computes tensors on cpu and cuda");
}

template <typename Array>
TensorView view_of(const std::string& name, const Array& array) {
  if (array.ndim() != 4) {
    throw InvalidArgument(name + " has " + std::to_string(array.ndim()) +
                          " dimensions; legal: 4, [batch, tokens, heads, head_dim]");
  }
  TensorView view;
  view.device = device_of(name, array);
  view.dtype = tensor_dtype(name, array.dtype());
  // Reading it is all that happens to an input.
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  for (std::size_t axis = 0; axis < 4; ++axis) {
    view.shape[axis] = static_cast<std::int64_t>(array.shape(axis));
    view.strides[axis] = array.stride(axis);
  }
  return view;
}

void require_cpu(const std::string& name, const ReadOnlyArray& array) {
  const Device device = device_of(name, array);
  if (device.kind != Device::Kind::kCpu) {
    throw InvalidArgument(name + " is on device " + device_name(device) + "; legal: cpu");
  }
}

std::int64_t load_integer(const std::string& name, const nb::dlpack::dtype& dtype,
                          const char* address) {
  const auto load = [&](auto zero) {
    std::memcpy(&zero, address, sizeof zero);
    return static_cast<std::int64_t>(zero);
  };
  if (is(dtype, nb::dlpack::dtype_code::Int)) {
    if (dtype.bits == 64) return load(std::int64_t{});
    if (dtype.bits == 32) return load(std::int32_t{});
  }
  throw InvalidArgument(name + " has dtype " + dtype_text(dtype) + "; legal: int32, int64");
}

float load_float(const std::string& name, const nb::dlpack::dtype& dtype, const char* address) {
  if (is(dtype, nb::dlpack::dtype_code::Float) && dtype.bits == 64) {
    double value = 0;
    std::memcpy(&value, address, sizeof value);
    return static_cast<float>(value);
  }
  return load_element(address, tensor_dtype(name, dtype), 0);
}

// Elements of a 1-d array, one by one.
template <typename Value, typename Load>
std::vector<Value> elements(const char* name, nb::handle object, const Load& load) {
  const ReadOnlyArray array = import_array(name, object);
  require_cpu(name, array);
  if (array.ndim() != 1) {
    throw InvalidArgument(std::string(name) + " has " + std::to_string(array.ndim()) +
                          " dimensions; legal: 1");
  }
  const std::int64_t step = array.stride(0) * static_cast<std::int64_t>(array.itemsize());
  const char* address = static_cast<const char*>(array.data());
  std::vector<Value> values;
  values.reserve(array.shape(0));
  for (std::size_t i = 0; i < array.shape(0); ++i, address += step) {
    values.push_back(load(name, array.dtype(), address));
  }
  return values;
}

template <typename Value>
bool from_list(const char* name, nb::handle object, std::vector<Value>& values) {
  if (!nb::isinstance<nb::list>(object) && !nb::isinstance<nb::tuple>(object)) return false;
  if (!nb::try_cast(object, values)) {
    throw InvalidArgument(std::string(name) + " is " + nb::cast<std::string>(nb::repr(object)) +
                          "; legal: a list of " +
                          (std::is_integral_v<Value> ? "whole numbers" : "numbers"));
  }
  return true;
}

}  // namespace

TensorArgument::TensorArgument(const char* name, nb::handle object, Access access) {
  if (access == Access::kRead) {
    array_ = import_array(name, object);
  } else {
    array_ = import_writable(name, object);
  }
  view_ = std::visit([&](const auto& array) { return view_of(name, array); }, array_);
}

PackedMask pack_mask(nb::handle object, std::int64_t batch, std::int64_t q_tokens,
                     std::int64_t kv_tokens, Device device) {
  const ReadOnlyArray array = import_array("mask", object);
  validate_device("mask", device_of("mask", array), device);
  const bool packed = array.dtype().bits == 64 && (is(array.dtype(), nb::dlpack::dtype_code::Int) ||
                                                   is(array.dtype(), nb::dlpack::dtype_code::UInt));
  const bool on_cpu = device.kind == Device::Kind::kCpu;
  if (!packed && !(on_cpu && is(array.dtype(), nb::dlpack::dtype_code::Bool))) {
    throw InvalidArgument(
        "mask has dtype " + dtype_text(array.dtype()) + " on " + device_name(device) +
        "; legal: " + (on_cpu ? "bool, true where the row sees the key, or " : "") +
        "int64 or uint64, bit j % 64 of word j / 64 for key j");
  }
  const auto extent = [&](std::size_t axis) {
    return static_cast<std::int64_t>(array.shape(axis));
  };
  const std::int64_t row_words = (kv_tokens + 63) / 64;
  const std::int64_t last = packed ? row_words : kv_tokens;
  if (array.ndim() != 3 || (extent(0) != batch && extent(0) != 1) || extent(1) != q_tokens ||
      extent(2) != last) {
    std::string shape;
    for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
      shape += (axis == 0 ? "" : ", ") + std::to_string(array.shape(axis));
    }
    throw InvalidArgument("mask has shape [" + shape + "]; legal: [" + std::to_string(batch) +
                          " or 1, " + std::to_string(q_tokens) + ", " + std::to_string(last) + "]");
  }
  PackedMask mask;
  if (packed) {
    if (last > 1 && array.stride(2) != 1) {
      throw InvalidArgument("mask has stride " + std::to_string(array.stride(2)) +
                            " along its words; legal: 1");
    }
    mask.given = array;
    mask.words = static_cast<const std::uint64_t*>(array.data());
    mask.row_stride = array.stride(1);
    mask.sequence_stride = extent(0) == 1 ? 0 : array.stride(0);
    return mask;
  }
  mask.row_stride = row_words;
  mask.sequence_stride = extent(0) == 1 ? 0 : q_tokens * row_words;
  mask.own.resize(static_cast<std::size_t>(extent(0) * q_tokens * row_words));
  mask.words = mask.own.data();
  const char* data = static_cast<const char*>(array.data());
  for (std::int64_t b = 0; b < extent(0); ++b) {
    for (std::int64_t i = 0; i < q_tokens; ++i) {
      std::uint64_t* words = mask.own.data() + (b * q_tokens + i) * row_words;
      const char* row = data + b * array.stride(0) + i * array.stride(1);
      for (std::int64_t j = 0; j < kv_tokens; ++j) {
        if (row[j * array.stride(2)] != 0) words[j / 64] |= std::uint64_t{1} << (j % 64);
      }
    }
  }
  return mask;
}

std::vector<std::int64_t> integers(const char* name, nb::handle object) {
  std::vector<std::int64_t> values;
  if (object.is_none() || from_list(name, object, values)) return values;
  return elements<std::int64_t>(name, object, load_integer);
}

std::vector<float> floats(const char* name, nb::handle object) {
  std::vector<float> values;
  if (object.is_none() || from_list(name, object, values)) return values;
  return elements<float>(name, object, load_float);
}

BlockTable block_table(nb::handle object, std::int64_t batch) {
  BlockTable table;
  if (object.is_none()) return table;
  const ReadOnlyArray array = import_array("block_table", object);
  require_cpu("block_table", array);
  if (array.ndim() != 2 || static_cast<std::int64_t>(array.shape(0)) != batch) {
    throw InvalidArgument("block_table has " + std::to_string(array.ndim()) + " dimensions and " +
                          std::to_string(array.ndim() > 0 ? array.shape(0) : 0) +
                          " rows; legal: [batch, pages_per_sequence], " + std::to_string(batch) +
                          " rows");
  }
  table.pages_per_sequence = static_cast<std::int64_t>(array.shape(1));
  table.pages.reserve(array.size());
  const auto itemsize = static_cast<std::int64_t>(array.itemsize());
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t p = 0; p < table.pages_per_sequence; ++p) {
      const std::int64_t page =
          load_integer("block_table", array.dtype(),
                       static_cast<const char*>(array.data()) +
                           (b * array.stride(0) + p * array.stride(1)) * itemsize);
      // Entries behind the last used page may hold anything; a used one out of int32's range is
      // refused as -1 is.
      const bool fits = page >= 0 && page <= std::numeric_limits<std::int32_t>::max();
      table.pages.push_back(fits ? static_cast<std::int32_t>(page) : -1);
    }
  }
  return table;
}

}  // namespace minference::python

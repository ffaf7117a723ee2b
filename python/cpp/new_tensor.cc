// Memory for results where the caller's library can only take a tensor over through DLPack.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "bindings.h"
#include "core/checked.h"
#include "minference/attention.h"
#include "minference/error.h"
#include "minference/tensor.h"
#include "tensor_argument.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  const auto code =
      dtype == DType::kBF16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * dtype_size(dtype)), 1};
}

void require_cpu(const TensorArgument& q) {
  if (q.device().kind != Device::Kind::kCpu) {
    throw Unsupported(
        "q is on device " + device_name(q.device()) +
        ", where results are made for torch and CuPy only; legal: out=, or tensors of "
        "these");
  }
}

// A new tensor on the CPU, every byte 0.
nb::ndarray<nb::array_api> zeros(const std::array<std::int64_t, 4>& shape, DType dtype) {
  std::int64_t bytes = dtype_size(dtype);
  for (const std::int64_t extent : shape)
    bytes = checked_mul(bytes, extent, "the size of a result");
  auto memory = std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes));
  void* data = memory.get();
  const nb::capsule owner(memory.release(),
                          [](void* p) noexcept { delete[] static_cast<std::byte*>(p); });
  std::array<std::size_t, 4> extents{};
  std::copy(shape.begin(), shape.end(), extents.begin());
  return nb::ndarray<nb::array_api>(data, 4, extents.data(), owner, nullptr, dlpack_dtype(dtype),
                                    nb::device::cpu::value);
}

nb::ndarray<nb::array_api> new_output(nb::handle q, nb::handle v) {
  const TensorArgument query("q", q, Access::kRead);
  require_cpu(query);
  const TensorView q_view = query.view();
  const TensorView v_view = TensorArgument("v", v, Access::kRead).view();
  return zeros({q_view.batch(), q_view.tokens(), q_view.heads(), v_view.dim()}, q_view.dtype);
}

nb::ndarray<nb::array_api> new_lse(nb::handle q) {
  const TensorArgument query("q", q, Access::kRead);
  require_cpu(query);
  const TensorView view = query.view();
  nb::ndarray<nb::array_api> lse =
      zeros({view.batch(), view.tokens(), view.heads(), 1}, DType::kF32);
  std::fill_n(static_cast<float*>(lse.data()), lse.size(), -std::numeric_limits<float>::infinity());
  return lse;
}

}  // namespace

void bind_new_tensor(nb::module_& module) {
  module.def("new_output", &new_output, nb::arg("q").none(), nb::arg("v").none(),
             "A tensor of zeros for attention's output, of q's dtype.");
  module.def("new_lse", &new_lse, nb::arg("q").none(), "A tensor of -inf for attention's lse.");
}

}  // namespace minference::python

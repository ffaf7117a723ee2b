// Tensors that Python hands over through DLPack or the buffer protocol, as TensorViews: no copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "minference/tensor.h"

namespace minference::python {

enum class Access : std::uint8_t { kRead, kWrite };

// A tensor argument of a call. Keeps the producer's memory alive as long as it lives; the GIL is
// needed to make and to destroy one.
class TensorArgument {
 public:
  // Throws InvalidArgument, naming the argument `name`, unless `object` is a 4-d tensor of a dtype
  // that the library has, and writable for Access::kWrite; Unsupported for one on a device that the
  // library never computes on.
  TensorArgument(const char* name, nanobind::handle object, Access access);

  const TensorView& view() const { return view_; }
  Device device() const { return view_.device; }

 private:
  std::variant<nanobind::ndarray<nanobind::ro>, nanobind::ndarray<>> array_;
  TensorView view_;
};

// A mask as VisibilityMask has it, one bit a key: the caller's words or, of a mask of bool, words of
// its own.
struct PackedMask {
  std::vector<std::uint64_t> own;
  nanobind::ndarray<nanobind::ro> given;
  const std::uint64_t* words = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t sequence_stride = 0;  // 0: all sequences share one mask
};

// `object`: [batch or 1, q_tokens, kv_tokens] of bool on the CPU, or [batch or 1, q_tokens, words] of
// int64 or uint64 on `device`. Throws InvalidArgument for anything else.
PackedMask pack_mask(nanobind::handle object, std::int64_t batch, std::int64_t q_tokens,
                     std::int64_t kv_tokens, Device device);

// Numbers of a list, or of a 1-d array of any integer or floating-point type on the CPU; None gives
// none. Throws InvalidArgument naming the argument `name`.
std::vector<std::int64_t> integers(const char* name, nanobind::handle object);
std::vector<float> floats(const char* name, nanobind::handle object);

// A block table [batch, pages_per_sequence].
struct BlockTable {
  std::vector<std::int32_t> pages;
  std::int64_t pages_per_sequence = 0;
};

// Throws InvalidArgument unless `object` is a 2-d array of integers on the CPU, or None: no pages.
BlockTable block_table(nanobind::handle object, std::int64_t batch);

}  // namespace minference::python

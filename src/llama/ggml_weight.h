// A ggml weight matrix as a LinearWeight, unpacked by our own unpackers.
#pragma once

#include <optional>

#include "ggml.h"
#include "linear/unpack.h"
#include "minference/linear.h"

namespace minference::llama_host {

// The format of a ggml type that src/linear unpacks itself.
std::optional<WeightFormat> weight_format(ggml_type type);

// Refers to the rows of `tensor` [K, N] (2-d, rows contiguous) in place.
class GgmlWeight {
 public:
  // `level` is the level of the kernels that will use it.
  GgmlWeight(const ggml_tensor* tensor, WeightFormat format, IsaLevel level);

  LinearWeight linear_weight() const;

 private:
  static void unpack(const void* self, std::int64_t row, std::int64_t begin, std::int64_t count,
                     float* out);

  const ggml_tensor* tensor_;
  UnpackBlocksFn unpack_blocks_;
  std::int64_t block_elements_;
  std::int64_t block_bytes_;
};

}  // namespace minference::llama_host

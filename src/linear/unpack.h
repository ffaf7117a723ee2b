// Unpackers of GGUF's weight formats to f32, one table per ISA level.
//
// The formats are those of GGUF files (ggml's block layouts); nothing here depends on ggml.
#pragma once

#include <cstdint>

#include "minference/isa.h"

namespace minference {

enum class WeightFormat : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4K,
  kQ5K,
  kQ6K
};

// Elements and bytes of one block of a format; a row is a whole number of blocks.
std::int64_t block_elements(WeightFormat format);
std::int64_t block_bytes(WeightFormat format);

// Unpacks `blocks` consecutive blocks.
using UnpackBlocksFn = void (*)(const void* data, std::int64_t blocks, float* out);

// The unpacker of a format for kernels of this level.
UnpackBlocksFn unpacker(WeightFormat format, IsaLevel level);

}  // namespace minference

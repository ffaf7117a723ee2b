// IndexRecipe: how a method finds its index, as data, for devices that follow it with kernels of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/pattern.h"

namespace minference {

struct IndexRecipe {
  enum class Kind : std::uint8_t {
    kPatterns,  // per query head a HeadPattern, estimated by the last 64 queries where it needs one
    kBlockSparse,  // per row block the key blocks whose means match best
  };
  Kind kind = Kind::kPatterns;
  std::vector<HeadPattern> patterns;  // kPatterns: [q_heads]
  std::int64_t top_k = 0;             // kBlockSparse: blocks per row block
};

}  // namespace minference

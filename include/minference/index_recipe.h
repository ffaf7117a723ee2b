// IndexRecipe: how a method finds its index, as data, for devices that follow it with kernels of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/pattern.h"

namespace minference {

// The rule of `auto`, as its options.
struct CoverageRule {
  double coverage = 0;
  double long_keys = 1;
  std::int64_t rows = 1;
  std::int64_t min_keys = 0;
  double max_cost = 1;
};

struct IndexRecipe {
  enum class Kind : std::uint8_t {
    kPatterns,  // per query head a HeadPattern, estimated by the last 64 queries where it needs one
    kBlockSparse,  // per row block the key blocks whose means match best
    kCoverage,     // the cheapest columns and runs that hold a share of the mass, or everything
  };
  Kind kind = Kind::kPatterns;
  std::vector<HeadPattern> patterns;  // kPatterns: [q_heads]
  std::int64_t top_k = 0;             // kBlockSparse: blocks per row block
  CoverageRule coverage;              // kCoverage
};

}  // namespace minference

// IndexRecipe: how a method finds its index, as data, for devices that follow it with kernels of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/pattern.h"

namespace minference {

// xattention's rule, docs/methods.md.
struct AntidiagonalRule {
  std::int64_t block_size = 128;
  std::int64_t stride = 8;
  double threshold = 0.9;
  double norm = 1;
};

// flexprefill's rule: budgets in blocks, the smallest at least 1.
struct FlexPrefillRule {
  std::int64_t block_size = 128;
  double gamma = 0.9;
  double tau = 0.1;
  std::int64_t min_blocks = 1;
  std::int64_t max_blocks = 1;
};

// The rule of `auto`, as its options.
struct CoverageRule {
  double coverage = 0;
  double long_keys = 1;
  std::int64_t rows = 1;
  std::int64_t min_keys = 0;
  double max_cost = 1;
  std::int64_t last_rows = 0;
};

struct IndexRecipe {
  enum class Kind : std::uint8_t {
    kPatterns,  // per query head a HeadPattern, estimated by the last 64 queries where it needs one
    kBlockSparse,   // per row block the key blocks whose means match best
    kAntidiagonal,  // per row block the key blocks that hold a share of the mass of antidiagonals
    kFlexPrefill,   // per head block columns and diagonals, or a map of pooled scores
    kCoverage,      // the cheapest columns and runs that hold a share of the mass, or everything
  };
  Kind kind = Kind::kPatterns;
  std::vector<HeadPattern> patterns;  // kPatterns: [q_heads]
  bool first_chunks = false;          // legal only for chunks from position 0
  std::int64_t top_k = 0;             // kBlockSparse: blocks per row block
  AntidiagonalRule antidiagonal;
  FlexPrefillRule flexprefill;
  CoverageRule coverage;  // kCoverage
  // kCoverage: rows of the same prompt that later calls bring, [batch], or empty where that is not
  // known.
  std::vector<std::int64_t> rows_after;
};

}  // namespace minference

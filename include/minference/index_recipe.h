// IndexRecipe: how a method finds its index, as data, for devices that follow it with kernels of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "minference/pattern.h"
#include "minference/segment.h"

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

// The rule of mminference, as its options.
struct ModalityRule {
  enum class Kind : std::uint8_t { kAuto, kGrid, kQBoundary, k2DBoundary, kVerticalSlash };
  Kind kind = Kind::kAuto;
  std::int64_t vertical = 0;
  std::int64_t slash = 0;
  std::int64_t n_local = 1;
  std::int64_t fold_columns = 1;
  double grid_share = 0;
  double min_gain = 0;
};

// What mminference looks at in one sequence: all that sizes and segments say.
struct ModalitySequence {
  // Where the lines of a visual segment are looked for, and with which strides.
  struct Grid {
    TokenRange tokens;
    TokenRange region;
    std::int64_t first_stride = 1;
    std::int64_t last_stride = 0;  // below the first: with none
  };

  bool dense = true;  // nothing is looked at
  // Modalities do not matter, and positions without mass count against the budgets.
  bool vertical_slash = false;
  std::int64_t q_len = 0;
  std::int64_t kv_len = 0;
  std::vector<TokenRange> visual;   // keys, ascending
  std::vector<TokenRange> samples;  // rows that are estimated by, at most 64 each
  // Places in `samples`: the last rows of text, of visual tokens, of the chunk.
  std::optional<std::size_t> text_rows;
  std::optional<std::size_t> visual_rows;
  std::optional<std::size_t> last_rows;
  std::int64_t initial_keys = 0;  // of grid heads
  std::vector<Grid> grids;        // one a visual segment; none without visual rows
};

struct IndexRecipe {
  enum class Kind : std::uint8_t {
    kPatterns,  // per query head a HeadPattern, estimated by the last 64 queries where it needs one
    kBlockSparse,   // per row block the key blocks whose means match best
    kAntidiagonal,  // per row block the key blocks that hold a share of the mass of antidiagonals
    kFlexPrefill,   // per head block columns and diagonals, or a map of pooled scores
    kCoverage,      // the cheapest columns and runs that hold a share of the mass, or everything
    kModalities,    // vertical_slash per modality, or a grid
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
  ModalityRule modality;                    // kModalities
  std::vector<ModalitySequence> sequences;  // kModalities: [batch]
};

}  // namespace minference

// The rule of mminference as a plain fp64 construction, token by token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "minference/attention.h"
#include "minference/segment.h"
#include "minference/sparse_index.h"

namespace minference::test {

struct ModalityRule {
  int kind = 0;  // as the option
  std::int64_t vertical = 1000;
  std::int64_t slash = 6096;
  std::int64_t n_init = 128;
  std::int64_t n_local = 1024;
  std::int64_t min_stride = 64;
  std::int64_t max_stride = 1024;
  std::int64_t fold_columns = 256;
  double grid_share = 0.8;
  double min_gain = 0.05;
};

struct ExpectedHead {
  int kind = 4;  // of the head: 1 grid, 2 q_boundary, 3 2d_boundary, 4 vertical_slash
  // Columns and single offsets, or the blocks of a grid.
  HeadIndex head;
  // How clearly the closest decision was taken, relative to what was compared.
  double margin = 0;
};

ExpectedHead modality_rule(const AttentionInput& input, const AttentionParams& params,
                           std::int64_t b, std::int64_t h, std::span<const Segment> segments,
                           const ModalityRule& rule);

}  // namespace minference::test

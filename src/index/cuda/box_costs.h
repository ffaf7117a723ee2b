// BoxCosts: what an executor needs for the boxes of an index, by kind, and when finding one pays.
#pragma once

#include "attention/cuda/problem.h"

namespace minference::cuda {

// In the time that a tile of query rows takes for a box of a long run. Ratios, measured on an H200
// (bench/cuda_box_costs.cc): they depend on the kernels more than on the device.
struct BoxCosts {
  float dense = 1;   // of exact attention
  float column = 1;  // of gathered columns
  // Of every run, beside the boxes that its tile loads: below 0, as each of the tile's two row blocks
  // leaves one of them out.
  float run = 0;
  float tile = 0;  // of every tile of an index, beside its boxes

  // Rows of exact attention over all keys that take as long as an estimate.
  float estimate_rows = 320;
  // Rows that see fewer keys on average are not estimated: even if it found next to nothing to keep,
  // an estimate would save less than it takes where nothing can be left out.
  float least_keys = 8192;
};

// Of the executor that takes the problem: Hopper's or the general one.
BoxCosts box_costs(const Problem& problem, bool hopper);

}  // namespace minference::cuda

// A short test of the attention kernels of one ISA level against the fp64 reference.
#pragma once

#include "minference/isa.h"

namespace minference::cli {

struct SelfTestResult {
  double max_error = 0;  // largest absolute difference to the reference, dense and sparse
  double bound = 0;      // largest one that is explained by rounding
  double seconds = 0;

  bool passed() const { return max_error <= bound; }
};

// `level` must be available. Throws what the kernels throw.
SelfTestResult self_test(IsaLevel level);

}  // namespace minference::cli

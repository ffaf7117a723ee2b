#include "index/cuda/box_costs.h"

#include <algorithm>

namespace minference::cuda {

BoxCosts box_costs(const Problem& problem, bool hopper) {
  BoxCosts costs;
  if (!hopper) {
    costs.dense = 1.02F;
    costs.column = 1.9F;
    costs.run = -0.15F;
    costs.tile = 6;
    return costs;
  }
  // The kernel for dense heads takes two boxes at a time, where they fit.
  costs.dense = std::max(problem.dim, problem.v_dim) <= 128 ? 0.93F : 1.0F;
  costs.column = 2.3F;
  costs.run = -0.7F;
  costs.tile = 5;
  return costs;
}

}  // namespace minference::cuda

#include "index/cuda/box_costs.h"

#include <algorithm>

namespace minference::cuda {

BoxCosts box_costs(const Problem& problem, bool hopper) {
  BoxCosts costs;
  if (!hopper) {
    costs.dense = 1.02F;
    costs.column = 1.9F;
    costs.run = -0.3F;
    costs.tile = 6;
    return costs;
  }
  // The kernel for dense heads takes two boxes at a time where they fit, and of small heads 192 rows.
  const int larger = std::max(problem.dim, problem.v_dim);
  costs.dense = larger <= 64 ? 0.75F : (larger <= 128 ? 0.92F : 1.0F);
  costs.column = 1.8F;
  costs.run = -0.8F;
  costs.tile = 5;
  return costs;
}

}  // namespace minference::cuda

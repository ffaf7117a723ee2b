// How a product of a query and a key becomes a score: scale and soft cap.
#pragma once

#include <cmath>

#include "minference/attention.h"

namespace minference {

// The factor that params.scale stands for.
inline float score_scale(const AttentionInput& input, const AttentionParams& params) {
  return params.scale != 0.0F ? params.scale : 1.0F / std::sqrt(static_cast<float>(input.q.dim()));
}

// A scaled product under a cap; 0: none.
inline float soft_capped(float score, float cap) {
  return cap > 0.0F ? cap * std::tanh(score / cap) : score;
}

}  // namespace minference

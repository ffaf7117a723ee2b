#include "bench/sparse_shapes.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "attention/cpu/executor.h"

namespace minference::bench {

MethodOptions vertical_slash_sizes(AttentionProblem& problem, const MethodOptions& sizes,
                                   double fraction) {
  const Method& method = find_method("vertical_slash");
  const auto scaled = [&](double factor) {
    MethodOptions options = sizes;
    for (auto& [name, value] : options) value = std::floor(value * factor);
    return options;
  };
  const AttentionInput input = problem.one_head_input();
  const AttentionOutput output = problem.one_head_output();
  const auto kept = [&](double factor) {
    const SparseIndex index = method.build_index(input, {}, scaled(factor), {});
    return attention_cpu(input, {}, output, &index, choose_isa(true)).kept_fraction();
  };
  // At this factor the larger budget alone covers every key.
  double largest = 1.0;
  for (const auto& [name, value] : sizes) largest = std::max(largest, value);
  double low = 0.0;
  double high = static_cast<double>(problem.shape().tokens) / largest + 1.0;
  constexpr int kSteps = 12;
  for (int step = 0; step < kSteps; ++step) {
    const double middle = (low + high) / 2.0;
    (kept(middle) < fraction ? low : high) = middle;
  }
  return scaled(low);
}

SparseIndex random_blocks(const ProblemShape& shape, double fraction) {
  SparseIndex index;
  index.batch = 1;
  index.q_heads = shape.q_heads;
  index.heads.resize(shape.q_heads);
  std::mt19937 random(1);
  const std::int64_t blocks = (shape.tokens + kRowBlock - 1) / kRowBlock;
  for (HeadIndex& head : index.heads) {
    head.kind = HeadIndex::Kind::kBlock;
    head.block_begin = {0};
    for (std::int64_t m = 0; m < blocks; ++m) {
      const auto visible = static_cast<double>(m + 1);
      std::int64_t wanted = std::clamp<std::int64_t>(std::llround(fraction * visible), 1, m + 1);
      for (std::int64_t n = 0; n <= m; ++n) {
        // Selection sampling, with the two that are always there taken first.
        const bool forced = n == m || (n == 0 && wanted > 1);
        const std::int64_t candidates = m - n;
        const bool chosen =
            candidates > 0 && static_cast<std::int64_t>(random() % candidates) < wanted - 1;
        if (!forced && !chosen) continue;
        head.block_ids.push_back(static_cast<std::int32_t>(n));
        --wanted;
      }
      head.block_begin.push_back(static_cast<std::int64_t>(head.block_ids.size()));
    }
  }
  return index;
}

}  // namespace minference::bench

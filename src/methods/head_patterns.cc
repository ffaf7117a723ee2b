#include "methods/head_patterns.h"

#include <vector>

#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "methods/shared_estimate.h"

namespace minference {

SparseIndex build_from_patterns(const AttentionInput& input, const AttentionParams& params,
                                const std::function<HeadPattern(std::int64_t)>& pattern_of,
                                const MethodContext& context, std::int64_t estimate_every) {
  const Stopwatch watch;
  SparseIndex index = dense_method().build_index(input, params, {}, {});
  std::vector<HeadPattern> patterns(index.q_heads);
  for (std::int64_t h = 0; h < index.q_heads; ++h) patterns[h] = pattern_of(h);
  std::vector<SequenceGeometry> geometry;
  std::vector<std::uint8_t> vertical_slash(index.heads.size(), 0);
  std::vector<std::uint8_t> block_sparse(index.heads.size(), 0);
  for (std::int64_t b = 0; b < index.batch; ++b) {
    geometry.emplace_back(input, params, b);
    for (std::int64_t h = 0; h < index.q_heads; ++h) {
      const HeadPattern& pattern = patterns[h];
      if (pattern.kind == HeadPattern::Kind::kAShape) {
        index.head(b, h) = a_shape_head(pattern.vertical, pattern.slash, geometry[b].kv_len);
      } else if (pattern.kind == HeadPattern::Kind::kBlockSparse) {
        block_sparse[b * index.q_heads + h] = 1;
      } else {
        vertical_slash[b * index.q_heads + h] =
            budgets_cover_all(pattern.vertical, pattern.slash, geometry[b].kv_len) ? 0 : 1;
      }
    }
  }
  SharedEstimate shared(input, context, index, geometry, estimate_every);
  estimate_last_q(input, params, kLastQ, shared.renew(vertical_slash),
                  [&](const LastQEstimate& estimate) {
                    const HeadPattern& pattern = patterns[estimate.h];
                    shared.head(estimate.b, estimate.h) =
                        vertical_slash_sets(estimate, pattern.vertical, pattern.slash);
                  });
  const auto heads = static_cast<std::int64_t>(index.heads.size());
  parallel_for(heads, params.threads, [&](std::int64_t i, int) {
    if (vertical_slash[i] == 0) return;
    const SequenceGeometry& sequence = geometry[i / index.q_heads];
    index.heads[i] = dense_where_cheaper(shared.head(i / index.q_heads, i % index.q_heads),
                                         sequence.q_len, sequence.kv_len);
  });
  block_sparse_heads(input, params, kBlockSparseTopK, block_sparse, index);
  index.build_seconds = watch.seconds();
  return index;
}

}  // namespace minference

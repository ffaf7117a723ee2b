#include "attention/kept_pairs.h"

#include "attention/visible_keys.h"
#include "core/parallel.h"

namespace minference {
namespace {

std::int64_t count_pairs(const SequenceGeometry& geometry, const HeadIndex* head) {
  std::int64_t pairs = 0;
  VisibleKeys keys;
  VisibleKeys::Tile tile;
  for_each_row_block(geometry, head, 0, geometry.q_len, [&](std::int64_t begin, std::int64_t end) {
    keys.start(geometry, head, begin, end);
    while (keys.next_keys(tile)) pairs += tile.pairs;
    while (keys.next_columns(tile)) pairs += tile.pairs;
  });
  return pairs;
}

}  // namespace

std::vector<std::int64_t> kept_pairs(const AttentionInput& input, const AttentionParams& params,
                                     const SparseIndex* index) {
  const std::int64_t q_heads = input.q.heads();
  std::vector<std::int64_t> dense;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    dense.push_back(SequenceGeometry(input, params, b).pairs());
  }
  std::vector<std::int64_t> pairs(input.q.batch() * q_heads);
  parallel_for(static_cast<std::int64_t>(pairs.size()), params.threads, [&](std::int64_t i, int) {
    const std::int64_t b = i / q_heads;
    const HeadIndex* head = sparse_head(index, b, i % q_heads);
    pairs[i] = head == nullptr ? dense[b] : count_pairs({input, params, b}, head);
  });
  return pairs;
}

}  // namespace minference

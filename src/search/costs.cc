// Measures what a pair costs in each kind of work of the method minference on this device.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/stopwatch.h"
#include "index/last_q.h"
#include "methods/head_rules.h"
#include "methods/synthetic_chunk.h"
#include "minference/error.h"
#include "minference/search.h"

namespace minference {
namespace {

// One chunk of a long prompt, as hosts compute it.
constexpr std::int64_t kRows = 1024;
constexpr std::int64_t kKeys = 8192;
constexpr std::int64_t kHeads = 4;
constexpr int kRepetitions = 5;

class Workload {
 public:
  Workload(std::int64_t dim, int threads)
      : chunk_({kRows, kKeys, kHeads, kHeads, dim, dim}, threads) {}

  const AttentionInput& input() const { return chunk_.input(); }
  const AttentionParams& params() const { return chunk_.params(); }

  struct Timing {
    double seconds = std::numeric_limits<double>::infinity();
    double pairs = 0;

    double per_pair() const { return seconds / pairs; }
  };

  // The fastest of several calls, after one that is not counted.
  static double fastest(const std::function<void()>& body) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i <= kRepetitions; ++i) {
      const Stopwatch watch;
      body();
      if (i > 0) best = std::min(best, watch.seconds());
    }
    return best;
  }

  // Attention in which every head is `head`.
  Timing time(const HeadIndex& head) const {
    SparseIndex index;
    index.batch = 1;
    index.q_heads = kHeads;
    index.heads.assign(kHeads, head);
    return time(index);
  }

  Timing time(const SparseIndex& index) const {
    Timing timing;
    timing.seconds = fastest([&] {
      timing.pairs =
          static_cast<double>(attention(input(), params(), chunk_.output(), &index).kept_pairs);
    });
    return timing;
  }

 private:
  SyntheticChunk chunk_;
};

}  // namespace

SearchCosts measure_search_costs(std::int64_t head_dim, int threads) {
  if (head_dim < 1 || head_dim > 256) {
    throw InvalidArgument("head_dim is " + std::to_string(head_dim) + "; legal: 1 to 256");
  }
  const Workload work(head_dim, threads);
  const double dense = work.time(HeadIndex{}).per_pair();

  // Single offsets far from each other, as estimates pick them.
  HeadIndex runs;
  runs.kind = HeadIndex::Kind::kDiagonal;
  runs.runs = {{0, kForcedOffsets, 1}};
  for (std::int64_t offset = 300; offset < kKeys; offset += 500) {
    runs.runs.push_back({offset, offset + 1, 1});
  }
  // The same and columns between them; the difference is what columns cost.
  HeadIndex columns = runs;
  for (std::int64_t key = 0; key < kKeys; key += 4) columns.columns.push_back(key);
  const Workload::Timing runs_time = work.time(runs);
  const Workload::Timing columns_time = work.time(columns);

  SparseIndex blocks;
  blocks.batch = 1;
  blocks.q_heads = kHeads;
  blocks.heads.resize(kHeads);
  const std::vector<std::uint8_t> every_head(kHeads, 1);
  const auto build_blocks = [&] {
    block_sparse_heads(work.input(), work.params(), kBlockSparseTopK / 4, every_head, blocks);
  };
  const double pooling = Workload::fastest(build_blocks);
  const Workload::Timing blocks_time = work.time(blocks);

  const double estimate = Workload::fastest([&] {
    estimate_last_q(work.input(), work.params(), kLastQ, every_head, [](const LastQEstimate&) {});
  });

  SearchCosts costs;
  costs.runs = runs_time.per_pair() / dense;
  costs.columns = std::max(0.0, columns_time.seconds - runs_time.seconds) /
                  (columns_time.pairs - runs_time.pairs) / dense;
  costs.window = work.time(a_shape_head(128, 1024, kKeys)).per_pair() / dense;
  costs.blocks = (pooling + blocks_time.seconds) / blocks_time.pairs / dense;
  costs.estimate = estimate / static_cast<double>(kHeads * kLastQ * kKeys) / dense;
  return costs;
}

}  // namespace minference

#include "methods/head_rules.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/cpu/kernel_table.h"
#include "core/parallel.h"
#include "index/block_grid.h"
#include "index/pooled.h"
#include "index/top_k.h"

namespace minference {
namespace {

// Above this share of the causal area full tiles are cheaper than gathering and masking.
constexpr double kDensePays = 0.9;

// Share of the causal area of a chunk that runs and columns cover, by row blocks.
double covered_share(const HeadIndex& head, std::int64_t q_len, std::int64_t kv_len) {
  std::int64_t covered = 0;
  std::int64_t causal = 0;
  for (std::int64_t row = 0; row < q_len; row += kRowBlock) {
    const std::int64_t rows = std::min(kRowBlock, q_len - row);
    const std::int64_t first = kv_len - q_len + row;
    const std::int64_t end = std::max<std::int64_t>(first + rows, 0);
    std::int64_t keys = std::min<std::int64_t>(static_cast<std::int64_t>(head.columns.size()), end);
    for (const OffsetRun& run : head.runs) {
      keys += std::max<std::int64_t>(
          std::min(first + rows - run.begin, end) - std::max<std::int64_t>(first - run.end + 1, 0),
          0);
    }
    covered += std::min(keys, end) * rows;
    causal += end * rows;
  }
  return causal > 0 ? static_cast<double>(covered) / static_cast<double>(causal) : 1.0;
}

// The forced key blocks and, if that is more, those of the highest scores up to `count` in all;
// ascending.
std::vector<std::int64_t> top_blocks(const float* scores, BlockGrid::Range visible,
                                     std::vector<std::int64_t> forced, std::int64_t count) {
  std::vector<std::int64_t> others;
  std::vector<float> values;
  for (std::int64_t n = visible.begin; n < visible.end; ++n) {
    if (std::binary_search(forced.begin(), forced.end(), n)) continue;
    others.push_back(n);
    values.push_back(scores[n]);
  }
  std::vector<std::int64_t> kept = std::move(forced);
  for (const std::int64_t i : top_k(values, count - static_cast<std::int64_t>(kept.size()))) {
    kept.push_back(others[i]);
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

}  // namespace

HeadIndex a_shape_head(std::int64_t n_init, std::int64_t n_local, std::int64_t kv_len) {
  HeadIndex head;
  if (n_init + n_local >= kv_len) return head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.exact_runs = true;
  for (std::int64_t key = 0; key < n_init; ++key) head.columns.push_back(key);
  if (n_local > 0) head.runs.push_back({0, n_local, 1});
  return head;
}

bool budgets_cover_all(std::int64_t vertical, std::int64_t slash, std::int64_t kv_len) {
  return std::max(vertical, kForcedColumns) >= kv_len || std::max(slash, kForcedOffsets) >= kv_len;
}

HeadIndex vertical_slash_head(const LastQEstimate& estimate, std::int64_t vertical,
                              std::int64_t slash, std::int64_t q_len) {
  HeadIndex head;
  const std::int64_t kv_len = estimate.kv_len;
  if (budgets_cover_all(vertical, slash, kv_len)) return head;
  head.kind = HeadIndex::Kind::kDiagonal;

  // The forced set comes first, the rest of the budget is filled from behind it.
  const auto select = [](std::span<const float> sums, std::int64_t forced, std::int64_t budget) {
    std::vector<std::int64_t> kept(forced);
    for (std::int64_t i = 0; i < forced; ++i) kept[i] = i;
    for (const std::int64_t i : top_k(sums.subspan(forced), std::max(budget, forced) - forced)) {
      kept.push_back(forced + i);
    }
    return kept;
  };
  head.columns = select(estimate.columns, kForcedColumns, vertical);
  const std::vector<std::int64_t> offsets = select(estimate.diagonals, kForcedOffsets, slash);
  std::vector<OffsetRun> runs;
  runs.reserve(offsets.size());
  for (const std::int64_t offset : offsets) runs.push_back({offset, offset + 1, 1});
  // Every offset covers whole rows blocks, so offsets closer than a row block overlap: joining them
  // adds no key to a full row block.
  head.runs = merge_runs(std::move(runs), kRowBlock - 1);

  if (covered_share(head, q_len, kv_len) >= kDensePays) return HeadIndex{};
  return head;
}

void block_sparse_heads(const AttentionInput& input, const AttentionParams& params,
                        std::int64_t top_k, std::span<const std::uint8_t> wanted,
                        SparseIndex& index) {
  const PooledKeys pooled(input, params, kKeyBlock, wanted);
  std::vector<BlockGrid> grids;
  for (std::int64_t b = 0; b < index.batch; ++b) {
    grids.emplace_back(SequenceGeometry(input, params, b), kKeyBlock);
  }
  std::vector<std::optional<PooledKeys::Scratch>> scratch(resolve_threads(params.threads));
  const auto heads = static_cast<std::int64_t>(index.heads.size());
  parallel_for(heads, params.threads, [&](std::int64_t i, int thread) {
    if (wanted[i] == 0) return;
    const BlockGrid& grid = grids[i / index.q_heads];
    if (!scratch[thread]) scratch[thread].emplace();
    std::vector<std::vector<std::int64_t>> kept(grid.row_blocks());
    for (std::int64_t first = 0; first < grid.row_blocks(); first += cpu::kTileRows) {
      const std::int64_t last = std::min(first + cpu::kTileRows, grid.row_blocks()) - 1;
      const PooledKeys::Scores scores =
          pooled.scores(i / index.q_heads, i % index.q_heads, grid.first_row(first),
                        grid.end_row(last), grid.size(), grid.visible(last).end, *scratch[thread]);
      for (std::int64_t m = first; m <= last; ++m) {
        kept[m] = top_blocks(scores.row(m - first), grid.visible(m), grid.forced(m), top_k);
      }
    }
    index.heads[i] = block_head(grid, input.q.tokens(), kept);
  });
}

}  // namespace minference

#include "methods/head_rules.h"

#include <algorithm>

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

}  // namespace minference

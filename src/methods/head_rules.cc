#include "methods/head_rules.h"

#include <algorithm>
#include <string>
#include <utility>

#include "attention/cpu/kernel_table.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "index/block_grid.h"
#include "index/pooled.h"
#include "index/top_k.h"
#include "methods/method_table.h"
#include "minference/error.h"

namespace minference {
namespace {

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

std::int64_t rows_after(const AttentionInput& input, const MethodContext& context, std::int64_t b) {
  if (context.rows_after.empty()) return 0;
  const auto size = static_cast<std::int64_t>(context.rows_after.size());
  if (size != input.q.batch()) {
    throw InvalidArgument(
        "rows_after has " + std::to_string(size) +
        " entries; legal: none, or one a sequence = " + std::to_string(input.q.batch()));
  }
  const std::int64_t rows = context.rows_after[b];
  if (rows < 0) {
    throw InvalidArgument("rows_after of sequence " + std::to_string(b) + " is " +
                          std::to_string(rows) + "; legal: 0 or more");
  }
  return rows;
}

std::int64_t whole_option(const MethodOptions& options, const char* name) {
  return static_cast<std::int64_t>(options.at(name));
}

HeadIndex fixed_head(std::int64_t n_init, std::vector<OffsetRun> runs, std::int64_t kv_len) {
  std::erase_if(runs, [](const OffsetRun& run) { return run.begin >= run.end; });
  std::int64_t nearest = 0;  // offsets from 0 on that are kept without a gap
  for (const OffsetRun& run : runs) {
    if (run.begin != nearest) break;
    nearest = run.stride == 1 ? run.end : run.begin + 1;
    if (run.stride != 1) break;
  }
  HeadIndex head;
  if (n_init + nearest >= kv_len) return head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.rounding = RunRounding::kNone;
  head.columns.resize(n_init);
  for (std::int64_t key = 0; key < n_init; ++key) head.columns[key] = key;
  head.runs = std::move(runs);
  return head;
}

HeadIndex a_shape_head(std::int64_t n_init, std::int64_t n_local, std::int64_t kv_len) {
  return fixed_head(n_init, {{0, n_local, 1}}, kv_len);
}

SparseIndex build_same_heads(
    const AttentionInput& input, const AttentionParams& params,
    const std::function<HeadIndex(const SequenceGeometry&, std::int64_t)>& head_of) {
  const Stopwatch watch;
  SparseIndex index = dense_method().build_index(input, params, {}, {});
  for (std::int64_t b = 0; b < index.batch; ++b) {
    const HeadIndex head = head_of(SequenceGeometry(input, params, b), b);
    for (std::int64_t h = 0; h < index.q_heads; ++h) index.head(b, h) = head;
  }
  index.build_seconds = watch.seconds();
  return index;
}

std::vector<MethodOption> triangle_options(double n_init, double n_local, double n_last) {
  return {{"n_init", "initial keys that every row sees", n_init, 0, kMaxCount, true},
          {"n_local", "nearest keys, the row's own included", n_local, 1, kMaxCount, true},
          {"n_last",
           "last rows of the prompt that see every key (of each chunk if the host cannot tell)",
           n_last, 0, kMaxCount, true}};
}

SparseIndex build_triangle(const AttentionInput& input, const AttentionParams& params,
                           const MethodOptions& options, const MethodContext& context) {
  const std::int64_t n_init = whole_option(options, "n_init");
  const std::int64_t n_local = whole_option(options, "n_local");
  const std::int64_t n_last = whole_option(options, "n_last");
  return build_same_heads(input, params, [&](const SequenceGeometry& sequence, std::int64_t b) {
    HeadIndex head = a_shape_head(n_init, n_local, sequence.kv_len);
    head.dense_last_rows = std::max<std::int64_t>(n_last - rows_after(input, context, b), 0);
    return head;
  });
}

bool budgets_cover_all(std::int64_t vertical, std::int64_t slash, std::int64_t kv_len) {
  return std::max(vertical, kForcedColumns) >= kv_len || std::max(slash, kForcedOffsets) >= kv_len;
}

std::vector<std::int64_t> forced_and_heaviest(std::span<const float> sums, std::int64_t forced,
                                              std::int64_t budget) {
  budget = std::max(budget, forced);
  forced = std::min(forced, static_cast<std::int64_t>(sums.size()));
  std::vector<std::int64_t> kept(forced);
  for (std::int64_t i = 0; i < forced; ++i) kept[i] = i;
  for (const std::int64_t i : top_k(sums.subspan(forced), budget - forced)) {
    kept.push_back(forced + i);
  }
  return kept;
}

std::vector<OffsetRun> runs_of(std::span<const std::int64_t> offsets) {
  std::vector<OffsetRun> runs;
  runs.reserve(offsets.size());
  for (const std::int64_t offset : offsets) runs.push_back({offset, offset + 1, 1});
  // Every offset covers whole row blocks, so offsets closer than a row block overlap: joining them
  // adds no key to a full row block.
  return merge_runs(std::move(runs), kRowBlock - 1);
}

HeadIndex vertical_slash_sets(const LastQEstimate& estimate, std::int64_t vertical,
                              std::int64_t slash) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.columns = forced_and_heaviest(estimate.columns, kForcedColumns, vertical);
  head.runs = runs_of(forced_and_heaviest(estimate.diagonals, kForcedOffsets, slash));
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
  std::vector<PooledKeys::Scratch> scratch(resolve_threads(params.threads));
  const auto heads = static_cast<std::int64_t>(index.heads.size());
  parallel_for(heads, params.threads, [&](std::int64_t i, int thread) {
    if (wanted[i] == 0) return;
    const BlockGrid& grid = grids[i / index.q_heads];
    std::vector<std::vector<std::int64_t>> kept(grid.row_blocks());
    for (std::int64_t first = 0; first < grid.row_blocks(); first += cpu::kTileRows) {
      const std::int64_t last = std::min(first + cpu::kTileRows, grid.row_blocks()) - 1;
      const PooledKeys::Scores scores =
          pooled.scores(i / index.q_heads, i % index.q_heads, grid.first_row(first),
                        grid.end_row(last), grid.size(), grid.visible(last).end, scratch[thread]);
      for (std::int64_t m = first; m <= last; ++m) {
        kept[m] = top_blocks(scores.row(m - first), grid.visible(m), grid.forced(m), top_k);
      }
    }
    index.heads[i] = block_head(grid, input.q.tokens(), kept);
  });
}

HeadIndex dense_where_cheaper(HeadIndex head, std::int64_t q_len, std::int64_t kv_len) {
  if (covered_share(head, q_len, kv_len) >= kDensePays) return {};
  return head;
}

}  // namespace minference

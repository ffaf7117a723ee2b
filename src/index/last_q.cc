#include "index/last_q.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "index/row_probabilities.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// One thread's memory, reused from head to head.
struct Worker {
  RowProbabilities probabilities;
  std::vector<float> columns;
  std::vector<float> diagonals;  // entry i: offset kv_len - 1 - i

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : probabilities(kernels, input, params) {}
};

// Adds the probabilities of rows [first_row, first_row + rows), at most kTileRows, to the sums.
void add_rows(const KernelTable& kernels, const SequenceGeometry& geometry, std::int64_t b,
              std::int64_t h, std::int64_t first_row, std::int64_t rows, Worker& worker) {
  // Row r at key c has offset kv_len - q_len + first_row + r - c, that is entry c - r + entry_of_0.
  const std::int64_t entry_of_0 = geometry.q_len - 1 - first_row;
  worker.probabilities.visit(
      geometry, b, h, first_row, rows, [&](const VisibleKeys::Tile& tile, const float* p) {
        kernels.add_sums(p, rows, tile.count, worker.columns.data() + tile.begin,
                         worker.diagonals.data() + tile.begin + entry_of_0);
      });
}

void estimate_head(const KernelTable& kernels, const SequenceGeometry& geometry,
                   std::int64_t last_q, Worker& worker, LastQEstimate& estimate) {
  const std::int64_t kv_len = geometry.kv_len;
  worker.columns.assign(kv_len + kTileKeys, 0.0F);
  worker.diagonals.assign(kv_len + last_q + kTileKeys, 0.0F);
  kernels.enter();
  for (std::int64_t row = geometry.q_len - last_q; row < geometry.q_len; row += kTileRows) {
    add_rows(kernels, geometry, estimate.b, estimate.h, row,
             std::min(kTileRows, geometry.q_len - row), worker);
  }
  kernels.leave();
  std::reverse(worker.diagonals.begin(), worker.diagonals.begin() + kv_len);

  estimate.kv_len = kv_len;
  estimate.rows = last_q;
  estimate.columns = {worker.columns.data(), static_cast<std::size_t>(kv_len)};
  estimate.diagonals = {worker.diagonals.data(), static_cast<std::size_t>(kv_len)};
}

}  // namespace

void estimate_last_q(const AttentionInput& input, const AttentionParams& params,
                     std::int64_t last_q, std::span<const std::uint8_t> wanted,
                     const std::function<void(const LastQEstimate&)>& consume) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  std::vector<SequenceGeometry> geometry;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) geometry.emplace_back(input, params, b);
  std::vector<std::optional<Worker>> workers(resolve_threads(params.threads));
  parallel_for(input.q.batch() * input.q.heads(), params.threads, [&](std::int64_t i, int thread) {
    if (wanted[i] == 0) return;
    LastQEstimate estimate;
    estimate.b = i / input.q.heads();
    estimate.h = i % input.q.heads();
    const SequenceGeometry& sequence = geometry[estimate.b];
    if (sequence.q_len == 0 || sequence.kv_len == 0) return;
    if (!workers[thread]) workers[thread].emplace(kernels, input, params);
    estimate_head(kernels, sequence, std::min(last_q, sequence.q_len), *workers[thread], estimate);
    consume(estimate);
  });
}

}  // namespace minference

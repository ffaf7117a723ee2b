#include "index/last_q.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// One thread's memory, reused from head to head.
struct Worker {
  RowBlockScratch rows;
  VisibleKeys visible;
  AlignedBuffer<std::byte> keys;       // one packed tile
  AlignedBuffer<float> probabilities;  // [kTileRows][kBatchKeys]
  std::vector<float> columns;
  std::vector<float> diagonals;  // entry i: offset kv_len - 1 - i

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0),
        keys(kTileKeys * rows.block.dim * kernels.element_size),
        probabilities(kTileRows * kBatchKeys) {}
};

// Adds the probabilities of rows [first_row, first_row + rows), at most kTileRows, to the sums.
void add_rows(const KernelTable& kernels, const AttentionInput& input,
              const SequenceGeometry& geometry, std::int64_t b, std::int64_t h,
              std::int64_t first_row, std::int64_t rows, Worker& worker) {
  RowBlock& block = worker.rows.block;
  worker.rows.load(b, h, rows, [&](std::int64_t i) { return first_row + i; });
  const RowSource source(input, input.k, b, h / (input.q.heads() / input.k.heads()));
  // The rows may straddle two row blocks of an index, which do not matter without an index.
  const auto for_each_tile = [&](auto&& visit) {
    VisibleKeys::Tile tile;
    worker.visible.start(geometry, nullptr, first_row, first_row + rows);
    while (worker.visible.next_keys(tile)) {
      const void* addresses[kTileKeys];
      const std::int64_t count = std::min(tile.count, geometry.kv_len - tile.begin);
      source.rows(tile.begin, count, addresses);
      kernels.pack_keys(addresses, input.k.dtype, count, input.k.dim(), block.dim,
                        worker.keys.data());
      worker.rows.load_keys(worker.keys.data(), count, tile.mask);
      visit(tile);
    }
  };

  for_each_tile(
      [&](const VisibleKeys::Tile&) { kernels.sum_exponentials(block, worker.rows.keys); });
  float log_sum[kTileRows];
  for (std::int64_t r = 0; r < rows; ++r) {
    const float sum = kernels.row_sum(block, r);
    // A row that sees nothing has only masked scores, whose probability must come out as 0.
    log_sum[r] = sum == 0.0F ? 0.0F : block.shift[r] + std::log2(sum);
  }
  // Row r at key c has offset kv_len - q_len + first_row + r - c, that is entry c - r + entry_of_0.
  const std::int64_t entry_of_0 = geometry.q_len - 1 - first_row;
  for_each_tile([&](const VisibleKeys::Tile& tile) {
    float* probabilities = worker.probabilities.data();
    kernels.probabilities(block, worker.rows.keys, log_sum, probabilities);
    kernels.add_sums(probabilities, rows, tile.count, worker.columns.data() + tile.begin,
                     worker.diagonals.data() + tile.begin + entry_of_0);
  });
}

void estimate_head(const KernelTable& kernels, const AttentionInput& input,
                   const SequenceGeometry& geometry, std::int64_t last_q, Worker& worker,
                   LastQEstimate& estimate) {
  const std::int64_t kv_len = geometry.kv_len;
  worker.columns.assign(kv_len + kTileKeys, 0.0F);
  worker.diagonals.assign(kv_len + last_q + kTileKeys, 0.0F);
  kernels.enter();
  for (std::int64_t row = geometry.q_len - last_q; row < geometry.q_len; row += kTileRows) {
    add_rows(kernels, input, geometry, estimate.b, estimate.h, row,
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
    estimate_head(kernels, input, sequence, std::min(last_q, sequence.q_len), *workers[thread],
                  estimate);
    consume(estimate);
  });
}

}  // namespace minference

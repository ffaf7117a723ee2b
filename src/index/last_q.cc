#include "index/last_q.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "index/packed_keys.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// One thread's memory, reused from head to head.
struct Worker {
  RowBlockScratch rows;
  VisibleKeys visible;
  AlignedBuffer<float> probabilities;  // [kTileRows][kProbabilityStride]
  std::vector<float> columns;
  std::vector<float> diagonals;  // entry i: offset kv_len - 1 - i

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0), probabilities(kTileRows * kProbabilityStride) {}
};

// Adds the probabilities of rows [first_row, first_row + rows), at most kTileRows, to the sums.
void add_rows(const KernelTable& kernels, const PackedKeys& packed, std::int64_t b, std::int64_t h,
              std::int64_t first_row, std::int64_t rows, Worker& worker) {
  const SequenceGeometry& geometry = packed.geometry()[b];
  RowBlock& block = worker.rows.block;
  KeyBatch& keys = worker.rows.keys;
  worker.rows.load(b, h, rows, [&](std::int64_t i) { return first_row + i; });
  // Calls visit(first key) for batches of keys. The rows may straddle two row blocks of an index,
  // which do not matter without an index; then there is no gap between tiles either.
  const auto for_each_batch = [&](auto&& visit) {
    VisibleKeys::Tile tile;
    std::int64_t begin = 0;
    keys.clear();
    worker.visible.start(geometry, nullptr, first_row, first_row + rows);
    while (worker.visible.next_keys(tile)) {
      if (!keys.fits(tile.count)) {
        visit(begin);
        keys.clear();
      }
      if (keys.granules == 0) begin = tile.begin;
      keys.add(packed.keys(b, h, tile.begin), packed.granule_bytes(), nullptr, 0, tile.count,
               tile.mask, rows);
    }
    if (keys.granules > 0) visit(begin);
  };

  for_each_batch([&](std::int64_t) { kernels.sum_exponentials(block, keys); });
  float log_sum[kTileRows];
  for (std::int64_t r = 0; r < rows; ++r) {
    const float sum = kernels.row_sum(block, r);
    // A row that sees nothing has only masked scores, whose probability must come out as 0.
    log_sum[r] = sum == 0.0F ? 0.0F : block.shift[r] + std::log2(sum);
  }
  // Row r at key c has offset kv_len - q_len + first_row + r - c, that is entry c - r + entry_of_0.
  const std::int64_t entry_of_0 = geometry.q_len - 1 - first_row;
  for_each_batch([&](std::int64_t begin) {
    float* probabilities = worker.probabilities.data();
    kernels.probabilities(block, keys, log_sum, probabilities);
    kernels.add_sums(probabilities, rows, keys.granules * kKeyGranule,
                     worker.columns.data() + begin, worker.diagonals.data() + begin + entry_of_0);
  });
}

void estimate_head(const KernelTable& kernels, const PackedKeys& packed, std::int64_t last_q,
                   Worker& worker, LastQEstimate& estimate) {
  const SequenceGeometry& geometry = packed.geometry()[estimate.b];
  last_q = std::min(last_q, geometry.q_len);
  const std::int64_t kv_len = geometry.kv_len;
  worker.columns.assign(kv_len + kTileKeys, 0.0F);
  worker.diagonals.assign(kv_len + last_q + kTileKeys, 0.0F);
  kernels.enter();
  for (std::int64_t row = geometry.q_len - last_q; row < geometry.q_len; row += kTileRows) {
    add_rows(kernels, packed, estimate.b, estimate.h, row,
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
  PackedKeys packed(kernels, input, params, last_q);
  std::vector<std::optional<Worker>> workers(resolve_threads(params.threads));
  packed.in_waves(wanted, [&](std::span<const std::int64_t> heads) {
    parallel_for(static_cast<std::int64_t>(heads.size()), params.threads,
                 [&](std::int64_t i, int thread) {
                   LastQEstimate estimate;
                   estimate.b = heads[i] / input.q.heads();
                   estimate.h = heads[i] % input.q.heads();
                   if (!workers[thread]) workers[thread].emplace(kernels, input, params);
                   estimate_head(kernels, packed, last_q, *workers[thread], estimate);
                   consume(estimate);
                 });
  });
}

}  // namespace minference

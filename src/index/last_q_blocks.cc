#include "index/last_q_blocks.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/precision.h"
#include "index/packed_keys.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// What one batch of keys adds to one row, relative to the row's shift at that time.
struct BatchSum {
  float near;  // keys of the nearer of the two blocks of offsets that the batch lies in
  float far;
  float shift;
};

struct Worker {
  RowBlockScratch rows;
  std::uint64_t far_mask[kTileRows][kBatchKeys / 64];
  float sums[kTileRows][2];
  std::vector<BatchSum> batches;  // [kTileRows][batches]
  std::vector<double> columns;
  std::vector<double> diagonals;

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0) {}
};

class Estimator {
 public:
  Estimator(const KernelTable& kernels, const PackedKeys& packed, std::int64_t block_size)
      : kernels_(kernels),
        packed_(packed),
        block_size_(block_size),
        // Batches must not straddle key blocks; then two blocks of offsets are the most they touch.
        batch_keys_(block_size % kBatchKeys == 0 ? kBatchKeys : kTileKeys) {}

  void estimate(LastQBlocks& estimate, Worker& worker) const {
    const SequenceGeometry& geometry = packed_.geometry()[estimate.b];
    const std::int64_t blocks = (geometry.kv_len + block_size_ - 1) / block_size_;
    worker.columns.assign(blocks, 0.0);
    worker.diagonals.assign(blocks, 0.0);
    estimate.rows = std::min(block_size_, geometry.q_len);
    kernels_.enter();
    for (std::int64_t row = geometry.q_len - estimate.rows; row < geometry.q_len;
         row += kTileRows) {
      add_rows(estimate, row, std::min(kTileRows, geometry.q_len - row), worker);
    }
    kernels_.leave();
    estimate.columns = worker.columns;
    estimate.diagonals = worker.diagonals;
  }

 private:
  void add_rows(const LastQBlocks& estimate, std::int64_t first_row, std::int64_t rows,
                Worker& worker) const {
    const SequenceGeometry& geometry = packed_.geometry()[estimate.b];
    RowBlock& block = worker.rows.block;
    worker.rows.load(estimate.b, estimate.h, rows, [&](std::int64_t i) { return first_row + i; });
    const std::int64_t begin = geometry.first_key(first_row) / batch_keys_ * batch_keys_;
    const std::int64_t end = geometry.end_key(first_row + rows - 1);
    if (begin >= end) return;
    const std::int64_t batches = (end - begin + batch_keys_ - 1) / batch_keys_;
    worker.batches.resize(kTileRows * batches);
    for (std::int64_t i = 0; i < batches; ++i) {
      load_batch(estimate, first_row, begin + i * batch_keys_, end, worker);
      kernels_.split_exponentials(block, worker.rows.keys, worker.far_mask, worker.sums);
      for (std::int64_t r = 0; r < rows; ++r) {
        worker.batches[r * batches + i] = {worker.sums[r][1], worker.sums[r][0], block.shift[r]};
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const float total = kernels_.row_sum(block, r);
      if (total == 0.0F) continue;  // sees nothing
      add_row(geometry.position(first_row + r), begin, block.shift[r], total,
              {worker.batches.data() + r * batches, static_cast<std::size_t>(batches)}, worker);
    }
  }

  // Keys [key, key + batch_keys_), below `end`, and which of them are in the farther block of
  // offsets: those at or before position - farther * block size.
  void load_batch(const LastQBlocks& estimate, std::int64_t first_row, std::int64_t key,
                  std::int64_t end, Worker& worker) const {
    const SequenceGeometry& geometry = packed_.geometry()[estimate.b];
    KeyBatch& keys = worker.rows.keys;
    keys.clear();
    const std::int64_t count = round_up(std::min(batch_keys_, end - key), kKeyGranule);
    keys.granules = count / kKeyGranule;
    for (std::int64_t g = 0; g < keys.granules; ++g) {
      keys.keys[g] = packed_.keys(estimate.b, estimate.h, key + g * kKeyGranule);
    }
    const std::int64_t rows = worker.rows.block.rows;
    keys.masked =
        geometry.end_key(first_row) < key + count || geometry.first_key(first_row + rows - 1) > key;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t position = geometry.position(first_row + r);
      const std::int64_t far_end = position - farther(position, key) * block_size_ + 1;
      for (std::int64_t w = 0; w < kBatchKeys / 64; ++w) {
        worker.far_mask[r][w] = range_bits(0, far_end, key + w * 64);
        if (!keys.masked) continue;
        keys.mask[r][w] = range_bits(geometry.first_key(first_row + r),
                                     geometry.end_key(first_row + r), key + w * 64);
      }
    }
  }

  // The block of offsets of a batch's first key.
  std::int64_t farther(std::int64_t position, std::int64_t key) const {
    return std::max<std::int64_t>(position - key, 0) / block_size_;
  }

  void add_row(std::int64_t position, std::int64_t begin, float shift, float total,
               std::span<const BatchSum> batches, Worker& worker) const {
    double weight = 1.0 / total;
    float of_weight = shift;
    std::int64_t key = begin;
    for (const BatchSum& batch : batches) {
      if (batch.near > 0.0F || batch.far > 0.0F) {
        if (batch.shift != of_weight) {
          weight = std::exp2(static_cast<double>(batch.shift) - shift) / total;
          of_weight = batch.shift;
        }
        const std::int64_t far = farther(position, key);
        worker.columns[key / block_size_] += (static_cast<double>(batch.near) + batch.far) * weight;
        worker.diagonals[far] += batch.far * weight;
        if (far > 0) worker.diagonals[far - 1] += batch.near * weight;
      }
      key += batch_keys_;
    }
  }

  const KernelTable& kernels_;
  const PackedKeys& packed_;
  std::int64_t block_size_;
  std::int64_t batch_keys_;
};

}  // namespace

void estimate_last_q_blocks(const AttentionInput& input, const AttentionParams& params,
                            std::int64_t block_size, std::span<const std::uint8_t> wanted,
                            const std::function<void(const LastQBlocks&, int thread)>& consume) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  PackedKeys packed(kernels, input, params, block_size);
  const Estimator estimator(kernels, packed, block_size);
  packed.for_each_head<Worker>(wanted,
                               [&](std::int64_t b, std::int64_t h, Worker& worker, int thread) {
                                 LastQBlocks estimate;
                                 estimate.b = b;
                                 estimate.h = h;
                                 estimator.estimate(estimate, worker);
                                 consume(estimate, thread);
                               });
}

}  // namespace minference

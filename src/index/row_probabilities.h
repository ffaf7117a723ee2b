// RowProbabilities: exact softmax probabilities of some query rows of a head over every key that they
// see, batch by batch, on the CPU tile kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/cpu/row_block_scratch.h"
#include "attention/visible_keys.h"
#include "index/packed_keys.h"

namespace minference {

// One thread's memory, reused from head to head. Sinks take no part; scores are computed twice instead
// of being kept. To be called between the kernels' enter() and leave().
class RowProbabilities {
 public:
  RowProbabilities(const cpu::KernelTable& kernels, const AttentionInput& input,
                   const AttentionParams& params)
      : kernels_(kernels),
        rows_(kernels, input, params, 0),
        probabilities_(cpu::kTileRows * cpu::kProbabilityStride) {}

  // Calls consume(begin, n_keys, p) with the probabilities of rows [first_row, first_row + rows), at
  // most kTileRows, of query head h for keys [begin, begin + n_keys), n_keys a multiple of 32, at
  // p + row * kProbabilityStride as KernelTable::probabilities() lays them out: key `begin` at
  // kMaxLanes. 0 where a row does not see the key.
  template <class Consume>
  void visit(const PackedKeys& packed, std::int64_t b, std::int64_t h, std::int64_t first_row,
             std::int64_t rows, Consume&& consume) {
    load(b, h, rows, [=](std::int64_t i) { return first_row + i; });
    // The rows may straddle two row blocks of an index, which do not matter without an index; then
    // there is no gap between tiles either.
    visit_batches(
        [&](cpu::KeyBatch& keys, auto&& batch) {
          VisibleKeys::Tile tile;
          std::int64_t begin = 0;
          visible_.start(packed.geometry()[b], nullptr, first_row, first_row + rows);
          while (visible_.next_keys(tile)) {
            if (!keys.fits(tile.count)) {
              batch(begin);
              keys.clear();
            }
            if (keys.granules == 0) begin = tile.begin;
            keys.add(packed.keys(b, h, tile.begin), packed.granule_bytes(), nullptr, 0, tile.count,
                     tile.mask, rows);
          }
          if (keys.granules > 0) batch(begin);
        },
        consume);
  }

  // The same in two steps, for rows from anywhere: row_at(i) for i < rows, and the batches that they
  // see. for_each_batch(keys, batch) is called twice; it fills the empty `keys` and calls batch(begin)
  // for each.
  template <class RowAt>
  void load(std::int64_t b, std::int64_t h, std::int64_t rows, RowAt&& row_at) {
    rows_.load(b, h, rows, row_at);
  }
  template <class ForEachBatch, class Consume>
  void visit_batches(ForEachBatch&& for_each_batch, Consume&& consume) {
    cpu::RowBlock& block = rows_.block;
    cpu::KeyBatch& keys = rows_.keys;
    keys.clear();
    for_each_batch(keys, [&](std::int64_t) { kernels_.sum_exponentials(block, keys); });
    float log_sum[cpu::kTileRows];
    seeing_rows_ = 0;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      const float sum = kernels_.row_sum(block, r);
      // A row that sees nothing has only masked scores, whose probability must come out as 0.
      log_sum[r] = sum == 0.0F ? 0.0F : block.shift[r] + std::log2(sum);
      seeing_rows_ += sum == 0.0F ? 0 : 1;
    }
    keys.clear();
    for_each_batch(keys, [&](std::int64_t begin) {
      kernels_.probabilities(block, keys, log_sum, probabilities_.data());
      consume(begin, keys.granules * cpu::kKeyGranule, probabilities_.data());
    });
  }

  // Rows of the last visit that see a key; known from the first consume() on.
  std::int64_t seeing_rows() const { return seeing_rows_; }

 private:
  const cpu::KernelTable& kernels_;
  cpu::RowBlockScratch rows_;
  VisibleKeys visible_;
  AlignedBuffer<float> probabilities_;  // [kTileRows][kProbabilityStride]
  std::int64_t seeing_rows_ = 0;
};

}  // namespace minference

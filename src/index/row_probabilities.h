// RowProbabilities: exact softmax probabilities of consecutive query rows over every key that they
// see, tile by tile, on the CPU tile kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/visible_keys.h"

namespace minference {

// One thread's memory, reused from head to head. Sinks take no part.
class RowProbabilities {
 public:
  RowProbabilities(const cpu::KernelTable& kernels, const AttentionInput& input,
                   const AttentionParams& params)
      : kernels_(kernels),
        input_(input),
        rows_(kernels, input, params, 0),
        keys_(cpu::kTileKeys * rows_.block.dim * kernels.element_size),
        probabilities_(cpu::kTileRows * cpu::kBatchKeys) {}

  // Calls consume(tile, p) with the probabilities of rows [first_row, first_row + rows), at most
  // kTileRows, of query head h at p[row * kBatchKeys + key - tile.begin]; 0 where a row does not see
  // the key. Scores are computed twice instead of being kept. To be called between the kernels'
  // enter() and leave().
  template <class Consume>
  void visit(const SequenceGeometry& geometry, std::int64_t b, std::int64_t h,
             std::int64_t first_row, std::int64_t rows, Consume&& consume) {
    cpu::RowBlock& block = rows_.block;
    rows_.load(b, h, rows, [&](std::int64_t i) { return first_row + i; });
    const auto for_each_tile = [&](auto&& visit_tile) {
      VisibleKeys::Tile tile;
      // The rows may straddle two row blocks of an index, which do not matter without an index.
      visible_.start(geometry, nullptr, first_row, first_row + rows);
      while (visible_.next_keys(tile)) {
        load_keys(geometry, b, h, tile);
        visit_tile(tile);
      }
    };
    for_each_tile([&](const VisibleKeys::Tile&) { kernels_.sum_exponentials(block, rows_.keys); });
    float log_sum[cpu::kTileRows];
    for (std::int64_t r = 0; r < rows; ++r) {
      const float sum = kernels_.row_sum(block, r);
      // A row that sees nothing has only masked scores, whose probability must come out as 0.
      log_sum[r] = sum == 0.0F ? 0.0F : block.shift[r] + std::log2(sum);
    }
    for_each_tile([&](const VisibleKeys::Tile& tile) {
      kernels_.probabilities(block, rows_.keys, log_sum, probabilities_.data());
      consume(tile, static_cast<const float*>(probabilities_.data()));
    });
  }

 private:
  void load_keys(const SequenceGeometry& geometry, std::int64_t b, std::int64_t h,
                 const VisibleKeys::Tile& tile) {
    const void* addresses[cpu::kTileKeys];
    const std::int64_t count = std::min(tile.count, geometry.kv_len - tile.begin);
    cpu::RowSource(input_, input_.k, b, h / (input_.q.heads() / input_.k.heads()))
        .rows(tile.begin, count, addresses);
    kernels_.pack_keys(addresses, input_.k.dtype, count, input_.k.dim(), rows_.block.dim,
                       keys_.data());
    rows_.load_keys(keys_.data(), count, tile.mask);
  }

  const cpu::KernelTable& kernels_;
  const AttentionInput& input_;
  cpu::RowBlockScratch rows_;
  VisibleKeys visible_;
  AlignedBuffer<std::byte> keys_;       // one packed tile
  AlignedBuffer<float> probabilities_;  // [kTileRows][kBatchKeys]
};

}  // namespace minference

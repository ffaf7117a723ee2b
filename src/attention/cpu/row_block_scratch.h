// RowBlockScratch: one thread's memory for a RowBlock and its keys, set up as all callers need it.
#pragma once

#include <cstdint>

#include "attention/cpu/kernel_table.h"
#include "core/aligned_buffer.h"
#include "minference/attention.h"

namespace minference::cpu {

class RowBlockScratch {
 public:
  RowBlock block;
  KeyBatch keys;

  // v_dim 0: without accumulator (estimators).
  RowBlockScratch(const KernelTable& kernels, const AttentionInput& input,
                  const AttentionParams& params, std::int64_t v_dim);

  // Loads query rows of head h, row_at(i) for i < rows, and empties the state.
  template <class RowAt>
  void load(std::int64_t b, std::int64_t h, std::int64_t rows, RowAt&& row_at) {
    const void* addresses[kTileRows] = {};
    for (std::int64_t i = 0; i < rows; ++i) addresses[i] = input_->q.row(b, row_at(i), h);
    load(addresses, rows);
  }
  // The same for query rows of any heads.
  void load(const void* const* addresses, std::int64_t rows) {
    block.rows = rows;
    kernels_->load_queries(addresses, input_->q.dtype, rows, input_->q.dim(), block.dim, block.q);
    kernels_->reset(block);
  }

 private:
  const KernelTable* kernels_;
  const AttentionInput* input_;
  AlignedBuffer<std::byte> elements_;
  AlignedBuffer<float> floats_;
};

}  // namespace minference::cpu

// NonFiniteValues: keeps a NaN or infinity among the values away from rows that do not see its key.
//
// A hidden key has weight 0, and 0 * NaN is NaN: in a masked batch, such a value reaches every row
// of the row block. A check in the kernels would slow every call; instead the executor looks at the
// result of a row block (all_finite()) and, in the rare case, attends to it once more with this.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/cpu/kernel_table.h"
#include "core/aligned_buffer.h"

namespace minference::cpu {

bool all_finite(const float* values, std::int64_t n);

class NonFiniteValues {
 public:
  NonFiniteValues(const KernelTable& kernels, std::int64_t v_dim);

  // Lets a masked batch read copies of its values in which those that are not finite are 0, valid
  // until the next call, and notes which of the `rows` query rows see them.
  void take_out(KeyBatch& batch, std::int64_t rows);
  // Adds what the rows see to their accumulators, whatever its weight: that changes no infinity.
  void put_back(RowBlock& block) const;

 private:
  template <class Word>
  void take_out_granule(const void* values, void* copy);

  std::int64_t element_size_;
  std::int64_t v_dim_;
  AlignedBuffer<std::byte> copies_;  // [KeyBatch::kMaxGranules] granules of packed values
  // Bits of the granule's keys whose value in this dim is +inf, -inf; both for a NaN.
  std::vector<std::uint32_t> positive_;  // [v_dim]
  std::vector<std::uint32_t> negative_;
  std::uint32_t keys_ = 0;  // keys of the granule with any such value
  // Not 0: the row sees a +inf, a -inf in this dim.
  std::vector<std::uint32_t> seen_positive_;  // [kTileRows][v_dim]
  std::vector<std::uint32_t> seen_negative_;
};

}  // namespace minference::cpu

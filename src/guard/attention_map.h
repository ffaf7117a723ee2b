// AttentionMap: one head's attention over a whole prompt in a small square picture: where its mass
// lies, and which keys an index kept.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// A square of size() x size() cells over the prompt's tokens: rows are queries, columns keys, cell i
// of a side covers positions [begin(i), begin(i + 1)). Filled chunk by chunk while the prompt is
// computed, so no Q or K has to be kept. Memory: 16 bytes a cell, whatever the prompt's length.
class AttentionMap {
 public:
  static constexpr std::int64_t kMaxSize = 256;
  // Mass is exact on the first rows, at most so many, of each row of cells: the work grows with the
  // number of keys and not with its square.
  static constexpr std::int64_t kSampledRows = 32;

  // Throws InvalidArgument unless `tokens` is positive.
  explicit AttentionMap(std::int64_t tokens);

  // Adds query head h of the only sequence of a causal call; null index: dense attention. Calls may
  // come in any order but each row once. Throws InvalidArgument when the call has positions beyond
  // the tokens. Otherwise the arguments are those of a call of attention() that has succeeded.
  void add(const AttentionInput& input, const AttentionParams& params, const SparseIndex* index,
           std::int64_t h);

  std::int64_t tokens() const { return tokens_; }
  std::int64_t size() const { return size_; }
  std::int64_t begin(std::int64_t cell) const { return (cell * tokens_ + size_ - 1) / size_; }

  // Whether any query of the row sees a key of the column in what was added.
  bool visible(std::int64_t row, std::int64_t column) const;
  // Attention mass, 0 to 1, that a query of the row puts on the keys of the column: the mean over
  // the sampled rows.
  double mass(std::int64_t row, std::int64_t column) const;
  // The part of mass() that lies on keys which were not kept.
  double lost(std::int64_t row, std::int64_t column) const;
  // Share, 0 to 1, of the cell's visible pairs that were kept; of all rows. 0 where none is visible.
  double kept(std::int64_t row, std::int64_t column) const;

 private:
  class Filler;

  double mean(const std::vector<float>& sums, std::int64_t row, std::int64_t column) const;
  std::int64_t cell(std::int64_t position) const { return position * size_ / tokens_; }

  std::int64_t tokens_;
  std::int64_t size_;
  std::vector<std::int64_t> sampled_;       // [size] rows in the sums of mass
  std::vector<float> mass_sums_;            // [size][size]
  std::vector<float> lost_sums_;            // [size][size]
  std::vector<std::uint32_t> kept_pairs_;   // [size][size]
  std::vector<std::uint32_t> dense_pairs_;  // [size][size]
};

}  // namespace minference

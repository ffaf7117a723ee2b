// BlockGrid: how the rows of a chunk and the keys of its sequence fall into blocks of one size.
//
// Row block m holds rows [m * size, (m + 1) * size) of the chunk, key block n the keys
// [n * size, (n + 1) * size) of the sequence. A chunk may begin at any position, so the positions
// of a row block's own rows lie in one key block, or straddle two.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/visible_keys.h"
#include "minference/sparse_index.h"

namespace minference {

class BlockGrid {
 public:
  // Key blocks [begin, end).
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;

    bool contains(std::int64_t n) const { return n >= begin && n < end; }
    std::int64_t size() const { return end - begin; }
  };

  // `size`: a multiple of kRowBlock.
  BlockGrid(const SequenceGeometry& geometry, std::int64_t size)
      : geometry_(geometry), size_(size) {}

  const SequenceGeometry& geometry() const { return geometry_; }
  std::int64_t size() const { return size_; }
  std::int64_t row_blocks() const { return (geometry_.q_len + size_ - 1) / size_; }
  std::int64_t key_blocks() const { return (geometry_.kv_len + size_ - 1) / size_; }
  std::int64_t first_row(std::int64_t m) const { return m * size_; }
  std::int64_t end_row(std::int64_t m) const;

  // Key blocks that some of the rows [begin, end) may see.
  Range visible_from(std::int64_t begin, std::int64_t end) const;
  Range visible(std::int64_t m) const { return visible_from(first_row(m), end_row(m)); }
  // Key blocks that hold keys of positions [first, last], as far as they are visible from m.
  Range at_positions(std::int64_t m, std::int64_t first, std::int64_t last) const;
  // Key blocks that hold the positions of row block m itself.
  Range diagonal(std::int64_t m) const;
  // What every block method keeps, whatever its estimate says: the diagonal, so that every row sees
  // its own key, and block 0, the attention sinks; ascending.
  std::vector<std::int64_t> forced(std::int64_t m) const;

 private:
  SequenceGeometry geometry_;
  std::int64_t size_;
};

// The block form that keeps kept[m], ascending key blocks of the grid, for row block m of the grid.
// Each block of the grid becomes size / kKeyBlock of the index's own; those that no row of an
// index's row block sees are left out. Dense when nothing is left out but those. q_tokens: rows of
// the tensor, which may exceed the sequence's.
HeadIndex block_head(const BlockGrid& grid, std::int64_t q_tokens,
                     std::span<const std::vector<std::int64_t>> kept);

}  // namespace minference

// VisibleKeys: walks the keys that a few consecutive query rows see, tile by tile, with bit masks.
//
// The one place that turns causality, windows, explicit masks and both forms of SparseIndex into
// tiles. Executors and the guard consume the tiles and know none of these rules.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Bits of [begin, end) in a word whose bit 0 is `key`.
inline std::uint64_t range_bits(std::int64_t begin, std::int64_t end, std::int64_t key) {
  const std::int64_t low = std::max<std::int64_t>(begin - key, 0);
  const std::int64_t high = std::min<std::int64_t>(end - key, 64);
  if (low >= high) return 0;
  const std::uint64_t upto = high == 64 ? ~0ULL : (1ULL << high) - 1;
  return upto & ~((1ULL << low) - 1);
}

// Sizes and visibility rules of one sequence.
struct SequenceGeometry {
  std::int64_t q_len = 0;
  std::int64_t kv_len = 0;
  bool causal = true;
  std::int64_t sliding_window = 0;
  const std::uint64_t* mask = nullptr;  // row-major bits, or null
  std::int64_t mask_row_stride = 0;

  SequenceGeometry(const AttentionInput& input, const AttentionParams& params, std::int64_t b);

  std::int64_t position(std::int64_t row) const { return kv_len - q_len + row; }
  // Without the mask, row sees keys [first_key(row), end_key(row)); both ascend with the row.
  std::int64_t first_key(std::int64_t row) const;
  std::int64_t end_key(std::int64_t row) const;
  // (row, key) pairs that dense attention computes.
  std::int64_t pairs() const;
};

class VisibleKeys {
 public:
  struct Tile {
    std::int64_t begin = 0;  // first key, or first entry of the head's columns; a multiple of 32
    std::int64_t count = 0;  // 32 or 64, may reach past the end of the keys
    std::int64_t pairs = 0;  // visible (row, key) pairs
    const std::uint64_t* mask = nullptr;  // one word per row, bit c = key begin + c; null = all
  };

  // Rows [row_begin, row_end), at most kRowBlock, all in one row block of the index. `head` may be
  // null (dense). With dense_last_rows the range must lie on one side of the boundary.
  void start(const SequenceGeometry& geometry, const HeadIndex* head, std::int64_t row_begin,
             std::int64_t row_end);

  // The next tile of consecutive keys; false at the end.
  bool next_keys(Tile& tile);
  // Then the next tile of the head's gathered columns, without keys that next_keys() gave.
  bool next_columns(Tile& tile);

  // Starts anew with one row, and sets the bits of the keys that it sees: bit j % 64 of bits[j / 64]
  // for key j. Needs one word more than the keys fill.
  void mark_row(const SequenceGeometry& geometry, const HeadIndex* head, std::int64_t row,
                std::uint64_t* bits);

 private:
  void mark_block_keys();
  std::uint64_t marked(std::int64_t key) const;
  void restrict_to_runs(std::int64_t key, std::array<std::uint64_t, kRowBlock>& words) const;
  bool covered_by_one_run(std::int64_t key, std::int64_t count) const;
  void finish_tile(std::int64_t count, Tile& tile) const;

  const SequenceGeometry* geometry_ = nullptr;
  const HeadIndex* head_ = nullptr;
  std::int64_t row_begin_ = 0;
  std::int64_t row_end_ = 0;
  std::int64_t first_ = 0;  // keys seen by any row lie in [first_, end_)
  std::int64_t end_ = 0;
  std::int64_t cursor_ = 0;
  std::int64_t column_cursor_ = 0;
  std::vector<std::uint64_t> marks_;  // keys of the row block's runs or blocks; empty = all
  std::array<std::uint64_t, kRowBlock> words_{};
};

// Marks, in units of 64 keys, the key blocks that next_keys() can give for any row of the sequence.
void mark_needed_keys(const SequenceGeometry& geometry, const HeadIndex* head,
                      std::vector<std::uint8_t>& needed);

// Cuts rows [row_begin, row_end) into ranges that VisibleKeys::start() takes with this head, and
// calls visit(begin, end) for each.
template <class Visit>
void for_each_row_block(const SequenceGeometry& geometry, const HeadIndex* head,
                        std::int64_t row_begin, std::int64_t row_end, Visit&& visit) {
  const std::int64_t dense_from =
      head == nullptr ? row_end : geometry.q_len - head->dense_last_rows;
  for (std::int64_t row = row_begin; row < row_end;) {
    std::int64_t end = std::min((row / kRowBlock + 1) * kRowBlock, row_end);
    if (row < dense_from) end = std::min(end, dense_from);
    visit(row, end);
    row = end;
  }
}

// The head's index, null when it is dense.
inline const HeadIndex* sparse_head(const SparseIndex* index, std::int64_t b, std::int64_t h) {
  if (index == nullptr || index->head(b, h).kind == HeadIndex::Kind::kDense) return nullptr;
  return &index->head(b, h);
}

}  // namespace minference

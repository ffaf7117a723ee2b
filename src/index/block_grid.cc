#include "index/block_grid.h"

#include <algorithm>

namespace minference {

std::int64_t BlockGrid::end_row(std::int64_t m) const {
  return std::min((m + 1) * size_, geometry_.q_len);
}

BlockGrid::Range BlockGrid::visible_from(std::int64_t begin, std::int64_t end) const {
  const std::int64_t last_key = geometry_.end_key(end - 1);
  const std::int64_t first_key = geometry_.first_key(begin);
  if (first_key >= last_key) return {};
  return {first_key / size_, (last_key + size_ - 1) / size_};
}

BlockGrid::Range BlockGrid::at_positions(std::int64_t m, std::int64_t first,
                                         std::int64_t last) const {
  const Range seen = visible(m);
  if (last < 0) return {};
  const Range at{std::max(std::max<std::int64_t>(first, 0) / size_, seen.begin),
                 std::min(last / size_ + 1, seen.end)};
  return at.begin < at.end ? at : Range{};
}

BlockGrid::Range BlockGrid::diagonal(std::int64_t m) const {
  return at_positions(m, geometry_.position(first_row(m)), geometry_.position(end_row(m) - 1));
}

std::vector<std::int64_t> BlockGrid::forced(std::int64_t m) const {
  std::vector<std::int64_t> blocks;
  if (visible(m).contains(0)) blocks.push_back(0);
  const Range own = diagonal(m);
  for (std::int64_t n = std::max<std::int64_t>(own.begin, 1); n < own.end; ++n) blocks.push_back(n);
  return blocks;
}

HeadIndex block_head(const BlockGrid& grid, std::int64_t q_tokens,
                     std::span<const std::vector<std::int64_t>> kept) {
  const BlockGrid fine(grid.geometry(), kRowBlock);
  const std::int64_t ratio = grid.size() / kKeyBlock;
  HeadIndex head;
  head.kind = HeadIndex::Kind::kBlock;
  head.block_begin.push_back(0);
  bool everything = true;
  for (std::int64_t m = 0; m < (q_tokens + kRowBlock - 1) / kRowBlock; ++m) {
    // Rows behind the sequence's last one keep nothing.
    const bool exists = m < fine.row_blocks();
    const BlockGrid::Range seen = exists ? fine.visible(m) : BlockGrid::Range{};
    if (exists) {
      for (const std::int64_t block : kept[m / ratio]) {
        const std::int64_t end = std::min((block + 1) * ratio, seen.end);
        for (std::int64_t n = std::max(block * ratio, seen.begin); n < end; ++n) {
          head.block_ids.push_back(static_cast<std::int32_t>(n));
        }
      }
    }
    const auto total = static_cast<std::int64_t>(head.block_ids.size());
    everything = everything && total - head.block_begin.back() == seen.size();
    head.block_begin.push_back(total);
  }
  return everything ? HeadIndex{} : head;
}

}  // namespace minference

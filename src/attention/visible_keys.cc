#include "attention/visible_keys.h"

#include <algorithm>
#include <bit>

namespace minference {
namespace {

constexpr std::int64_t kWord = 64;
constexpr std::int64_t kGranule = kRunGranule;

// Bits 0, stride, 2 * stride, ... of a word.
std::uint64_t every_bit(std::int64_t stride) {
  std::uint64_t bits = 1;
  for (std::int64_t shift = stride; shift < kWord; shift *= 2) bits |= bits << shift;
  return bits;
}

// 64 bits starting at bit `at`, a multiple of 32; `words` has a spare word at its end.
std::uint64_t extract(const std::uint64_t* words, std::int64_t at) {
  const std::int64_t word = at / kWord;
  if (at % kWord == 0) return words[word];
  return words[word] >> kGranule | words[word + 1] << kGranule;
}

// Keys that RunRounding::kBox gives a row block for a run.
std::int64_t boxed_keys(const OffsetRun& run) {
  return (run.end - run.begin + kRowBlock - 1 + kRunBox - 1) / kRunBox * kRunBox;
}

void set_range(std::vector<std::uint64_t>& words, std::int64_t begin, std::int64_t end) {
  for (std::int64_t key = begin / kWord * kWord; key < end; key += kWord) {
    words[key / kWord] |= range_bits(begin, end, key);
  }
}

}  // namespace

SequenceGeometry::SequenceGeometry(const AttentionInput& input, const AttentionParams& params,
                                   std::int64_t b)
    : q_len(input.q_lens.empty() ? input.q.tokens() : input.q_lens[b]),
      kv_len(input.kv_lens.empty() ? input.k.tokens() : input.kv_lens[b]),
      causal(params.causal && input.mask.empty()),
      sliding_window(params.sliding_window) {
  if (!input.mask.empty()) {
    mask = input.mask.words + b * input.mask.sequence_stride;
    mask_row_stride = input.mask.row_stride;
  }
}

std::int64_t SequenceGeometry::first_key(std::int64_t row) const {
  if (sliding_window == 0) return 0;
  return std::clamp<std::int64_t>(position(row) - sliding_window + 1, 0, kv_len);
}

std::int64_t SequenceGeometry::end_key(std::int64_t row) const {
  return causal ? std::clamp<std::int64_t>(position(row) + 1, 0, kv_len) : kv_len;
}

std::int64_t SequenceGeometry::pairs() const {
  std::int64_t total = 0;
  for (std::int64_t row = 0; row < q_len; ++row) {
    const std::int64_t begin = first_key(row);
    const std::int64_t end = end_key(row);
    if (mask == nullptr) {
      total += std::max<std::int64_t>(end - begin, 0);
      continue;
    }
    for (std::int64_t key = begin / kWord * kWord; key < end; key += kWord) {
      total +=
          std::popcount(mask[row * mask_row_stride + key / kWord] & range_bits(begin, end, key));
    }
  }
  return total;
}

void VisibleKeys::start(const SequenceGeometry& geometry, const HeadIndex* head,
                        std::int64_t row_begin, std::int64_t row_end) {
  geometry_ = &geometry;
  head_ = head;
  row_begin_ = row_begin;
  row_end_ = row_end;
  if (head != nullptr && row_begin >= geometry.q_len - head->dense_last_rows) head_ = nullptr;
  first_ = geometry.first_key(row_begin);
  end_ = geometry.end_key(row_end - 1);
  cursor_ = first_ / kGranule * kGranule;
  column_cursor_ = 0;
  marks_.clear();
  if (head_ != nullptr) mark_block_keys();
}

void VisibleKeys::mark_block_keys() {
  const SequenceGeometry& g = *geometry_;
  marks_.assign((g.kv_len + kWord - 1) / kWord + 2, 0);
  const std::int64_t block = row_begin_ / kRowBlock;
  if (head_->kind == HeadIndex::Kind::kBlock) {
    for (std::int64_t i = head_->block_begin[block]; i < head_->block_begin[block + 1]; ++i) {
      const std::int64_t key = head_->block_ids[i] * kKeyBlock;
      set_range(marks_, std::max(key, first_), std::min(key + kKeyBlock, end_));
    }
    return;
  }
  const std::int64_t first_position = g.position(block * kRowBlock);
  const std::int64_t last_position = g.position(std::min((block + 1) * kRowBlock, g.q_len) - 1);
  const std::int64_t granule = head_->rounding == RunRounding::kGranule ? kRunGranule : 1;
  for (const OffsetRun& run : head_->runs) {
    if (head_->rounding == RunRounding::kBox) {
      const std::int64_t end = first_position + kRowBlock - run.begin;
      set_range(marks_, std::max(end - boxed_keys(run), first_), std::min(end, end_));
      continue;
    }
    const std::int64_t begin = std::max<std::int64_t>(first_position - run.end + 1, 0);
    const std::int64_t end = std::max<std::int64_t>(last_position - run.begin + 1, 0);
    set_range(marks_, std::max(begin / granule * granule, first_),
              std::min((end + granule - 1) / granule * granule, end_));
  }
}

std::uint64_t VisibleKeys::marked(std::int64_t key) const {
  return marks_.empty() ? ~0ULL : extract(marks_.data(), key);
}

void VisibleKeys::restrict_to_runs(std::int64_t key,
                                   std::array<std::uint64_t, kRowBlock>& words) const {
  for (std::int64_t row = row_begin_; row < row_end_; ++row) {
    const std::int64_t position = geometry_->position(row);
    std::uint64_t covered = 0;
    for (const OffsetRun& run : head_->runs) {
      const std::uint64_t range = range_bits(position - run.end + 1, position - run.begin + 1, key);
      if (run.stride == 1 || range == 0) {
        covered |= range;
        continue;
      }
      const int low = std::countr_zero(range);
      // The offset falls by 1 with each key, so its remainder is the way to the next kept key.
      const std::int64_t first = low + (position - (key + low) - run.begin) % run.stride;
      if (first < kWord) covered |= every_bit(run.stride) << first & range;
    }
    words[row - row_begin_] &= covered;
  }
}

bool VisibleKeys::covered_by_one_run(std::int64_t key, std::int64_t count) const {
  const std::int64_t smallest = geometry_->position(row_begin_) - (key + count - 1);
  const std::int64_t largest = geometry_->position(row_end_ - 1) - key;
  return std::any_of(head_->runs.begin(), head_->runs.end(), [&](const OffsetRun& run) {
    return run.stride == 1 && run.begin <= smallest && largest < run.end;
  });
}

// Drops the mask when it is all ones, counts the pairs.
void VisibleKeys::finish_tile(std::int64_t count, Tile& tile) const {
  const std::int64_t rows = row_end_ - row_begin_;
  tile.count = count;
  tile.pairs = 0;
  for (std::int64_t r = 0; r < rows; ++r) tile.pairs += std::popcount(words_[r]);
  tile.mask = tile.pairs == rows * count ? nullptr : words_.data();
}

bool VisibleKeys::next_keys(Tile& tile) {
  const SequenceGeometry& g = *geometry_;
  const bool exact = head_ != nullptr && head_->kind == HeadIndex::Kind::kDiagonal &&
                     head_->rounding == RunRounding::kNone;
  while (cursor_ < end_) {
    const std::uint64_t base = marked(cursor_) & range_bits(first_, end_, cursor_);
    if (static_cast<std::uint32_t>(base) == 0) {
      cursor_ += base == 0 ? kWord : kGranule;
      continue;
    }
    const std::int64_t count = base >> kGranule == 0 ? kGranule : kWord;
    const std::uint64_t all = count == kWord ? ~0ULL : (1ULL << kGranule) - 1;
    tile.begin = cursor_;
    cursor_ += count;
    const bool whole = base == all && g.mask == nullptr &&
                       g.first_key(row_end_ - 1) <= tile.begin &&
                       g.end_key(row_begin_) >= tile.begin + count &&
                       (!exact || covered_by_one_run(tile.begin, count));
    if (whole) {
      tile.count = count;
      tile.pairs = count * (row_end_ - row_begin_);
      tile.mask = nullptr;
      return true;
    }
    for (std::int64_t row = row_begin_; row < row_end_; ++row) {
      std::uint64_t word = base & range_bits(g.first_key(row), g.end_key(row), tile.begin);
      if (g.mask != nullptr && word != 0) {
        const std::uint64_t* bits = g.mask + row * g.mask_row_stride;
        const std::int64_t at = tile.begin / kWord;
        // Not extract(): a mask has no spare word, and one half of the tile may lie past its end.
        std::uint64_t visible = bits[at] >> (tile.begin % kWord);
        if (tile.begin % kWord != 0 && word >> kGranule != 0) visible |= bits[at + 1] << kGranule;
        word &= visible;
      }
      words_[row - row_begin_] = word;
    }
    if (exact) restrict_to_runs(tile.begin, words_);
    finish_tile(count, tile);
    if (tile.pairs > 0) return true;
  }
  return false;
}

bool VisibleKeys::next_columns(Tile& tile) {
  if (head_ == nullptr || head_->kind != HeadIndex::Kind::kDiagonal) return false;
  const SequenceGeometry& g = *geometry_;
  const std::vector<std::int64_t>& columns = head_->columns;
  // Columns past the end of a shorter sequence are neither packed nor marked.
  const std::int64_t total =
      std::lower_bound(columns.begin(), columns.end(), g.kv_len) - columns.begin();
  while (column_cursor_ < total && columns[column_cursor_] < end_) {
    const std::int64_t begin = column_cursor_;
    const std::int64_t size = std::min(total - begin, kWord);
    column_cursor_ += size;
    std::uint64_t outside = 0;  // columns that no run of the row block covers
    std::uint64_t inside = 0;
    for (std::int64_t c = 0; c < size; ++c) {
      const std::int64_t key = columns[begin + c];
      const bool in_runs = (marks_[key / kWord] >> (key % kWord) & 1U) != 0;
      (in_runs ? inside : outside) |= 1ULL << c;
    }
    // Marked keys were computed by all rows; exact runs left gaps among them.
    if (head_->rounding != RunRounding::kNone) inside = 0;
    if ((outside | inside) == 0) continue;
    for (std::int64_t row = row_begin_; row < row_end_; ++row) {
      const auto* from = columns.data() + begin;
      const std::int64_t low = std::lower_bound(from, from + size, g.first_key(row)) - from;
      const std::int64_t high = std::lower_bound(from, from + size, g.end_key(row)) - from;
      const std::uint64_t range = range_bits(low, high, 0);
      std::uint64_t word = outside & range;
      for (std::uint64_t rest = inside & range; rest != 0; rest &= rest - 1) {
        const int c = std::countr_zero(rest);
        const std::int64_t offset = g.position(row) - from[c];
        const bool covered =
            std::any_of(head_->runs.begin(), head_->runs.end(),
                        [&](const OffsetRun& run) { return run.contains(offset); });
        if (!covered) word |= 1ULL << c;
      }
      if (g.mask != nullptr) {
        for (std::uint64_t rest = word; rest != 0; rest &= rest - 1) {
          const int c = std::countr_zero(rest);
          const std::uint64_t bits = g.mask[row * g.mask_row_stride + from[c] / kWord];
          if ((bits >> (from[c] % kWord) & 1U) == 0) word &= ~(1ULL << c);
        }
      }
      words_[row - row_begin_] = word;
    }
    tile.begin = begin;
    finish_tile(size <= kGranule ? kGranule : kWord, tile);
    if (tile.pairs > 0) return true;
  }
  return false;
}

void VisibleKeys::mark_row(const SequenceGeometry& geometry, const HeadIndex* head,
                           std::int64_t row, std::uint64_t* bits) {
  start(geometry, head, row, row + 1);
  const std::uint64_t* mask =
      geometry.mask == nullptr ? nullptr : geometry.mask + row * geometry.mask_row_stride;
  const auto mark = [&](std::int64_t key, std::uint64_t word) {
    bits[key / kWord] |= mask == nullptr ? word : word & mask[key / kWord];
  };
  if (head_ != nullptr && head_->kind == HeadIndex::Kind::kDiagonal) {
    const auto& columns = head_->columns;
    auto column = std::lower_bound(columns.begin(), columns.end(), first_);
    for (; column != columns.end() && *column < end_; ++column) {
      mark(*column, std::uint64_t{1} << (*column % kWord));
    }
    if (head_->rounding == RunRounding::kNone) {
      // The row block's marks are no row's.
      Tile tile;
      while (next_keys(tile)) {
        const std::uint64_t all = tile.count == kWord ? ~std::uint64_t{0} : (1ULL << kGranule) - 1;
        const std::uint64_t word = tile.mask == nullptr ? all : tile.mask[0];
        const std::int64_t shift = tile.begin % kWord;
        bits[tile.begin / kWord] |= word << shift;
        if (shift > 0) bits[tile.begin / kWord + 1] |= word >> (kWord - shift);
      }
      return;
    }
  }
  for (std::int64_t key = first_ / kWord * kWord; key < end_; key += kWord) {
    const std::uint64_t marked = marks_.empty() ? ~std::uint64_t{0} : marks_[key / kWord];
    mark(key, marked & range_bits(first_, end_, key));
  }
}

void mark_needed_keys(const SequenceGeometry& geometry, const HeadIndex* head,
                      std::vector<std::uint8_t>& needed) {
  const auto mark = [&](std::int64_t begin, std::int64_t end) {
    begin = std::max<std::int64_t>(begin, 0);
    end = std::min(end, geometry.kv_len);
    if (begin >= end) return;
    std::fill(needed.begin() + begin / kWord, needed.begin() + (end - 1) / kWord + 1, 1);
  };
  if (geometry.q_len == 0) return;
  if (head == nullptr || head->dense_last_rows > 0) {
    const std::int64_t row =
        head == nullptr ? 0 : std::max<std::int64_t>(geometry.q_len - head->dense_last_rows, 0);
    mark(geometry.first_key(row), geometry.end_key(geometry.q_len - 1));
    if (head == nullptr) return;
  }
  const std::int64_t row_blocks = (geometry.q_len + kRowBlock - 1) / kRowBlock;
  for (std::int64_t block = 0; block < row_blocks; ++block) {
    if (head->kind == HeadIndex::Kind::kBlock) {
      for (std::int64_t i = head->block_begin[block]; i < head->block_begin[block + 1]; ++i) {
        mark(head->block_ids[i] * kKeyBlock, (head->block_ids[i] + 1) * kKeyBlock);
      }
      continue;
    }
    const std::int64_t first = geometry.position(block * kRowBlock);
    const std::int64_t last =
        geometry.position(std::min((block + 1) * kRowBlock, geometry.q_len) - 1);
    for (const OffsetRun& run : head->runs) {
      // Boxes reach further than the granules that `needed` counts in.
      const bool boxes = head->rounding == RunRounding::kBox;
      mark(boxes ? first + kRowBlock - run.begin - boxed_keys(run) : first - run.end + 1,
           boxes ? first + kRowBlock - run.begin : last - run.begin + 1);
    }
  }
}

}  // namespace minference

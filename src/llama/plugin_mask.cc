#include "llama/plugin_mask.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/float16.h"
#include "core/parallel.h"
#include "minference/error.h"

namespace minference::llama_host {
namespace {

constexpr std::uint16_t kHidden = 0xFC00;  // -inf as f16
// Shorter causal runs are not worth a call of their own.
constexpr std::int64_t kMinCausalRows = 16;
constexpr std::int64_t kRowsPerTask = 32;

bool visible(std::uint16_t value) { return (value & 0x7FFFU) == 0; }

// The keys that a row sees: all of [begin, end), or some of them.
struct RowExtent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool whole = false;  // false also for a row that sees nothing
};

// Visible elements, and elements that are neither visible nor hidden. 16-bit counters keep the loop
// in 16-bit lanes; `count` must be below 2^16.
void count_block(const std::uint16_t* data, std::int64_t count, std::int64_t& seen,
                 std::int64_t& strange) {
  std::uint16_t zeros = 0;
  std::uint16_t infinities = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    zeros = static_cast<std::uint16_t>(zeros + ((data[j] & 0x7FFFU) == 0 ? 1 : 0));
    infinities = static_cast<std::uint16_t>(infinities + (data[j] == kHidden ? 1 : 0));
  }
  seen += zeros;
  strange += count - zeros - infinities;
}

RowExtent read_row(const MaskView& mask, std::int64_t row) {
  constexpr std::int64_t kBlock = 8192;
  const std::uint16_t* data = mask.data + row * mask.row_stride;
  std::int64_t seen = 0;
  std::int64_t strange = 0;
  for (std::int64_t j = 0; j < mask.keys; j += kBlock) {
    count_block(data + j, std::min(kBlock, mask.keys - j), seen, strange);
  }
  if (strange > 0) {
    const std::uint16_t* bad = std::find_if(
        data, data + mask.keys, [](std::uint16_t v) { return !visible(v) && v != kHidden; });
    throw Unsupported("the attention mask holds " + std::to_string(f16_to_f32(*bad)) + " at row " +
                      std::to_string(row) + ", key " + std::to_string(bad - data) +
                      ": only 0 and -inf are supported; use MINFERENCE_ATTN=stock for this model");
  }
  RowExtent extent;
  if (seen == 0) return extent;
  extent.begin = std::find_if(data, data + mask.keys, visible) - data;
  extent.end = mask.keys;
  while (!visible(data[extent.end - 1])) --extent.end;
  extent.whole = extent.end - extent.begin == seen;
  return extent;
}

void append_masked(std::vector<RowRun>& runs, const RowRun& run) {
  if (runs.empty() || runs.back().causal) {
    runs.push_back(run);
    return;
  }
  RowRun& last = runs.back();
  last.rows += run.rows;
  if (run.key_begin == run.key_end) return;
  if (last.key_begin == last.key_end) {
    last.key_begin = run.key_begin;
    last.key_end = run.key_end;
  }
  last.key_begin = std::min(last.key_begin, run.key_begin);
  last.key_end = std::max(last.key_end, run.key_end);
}

}  // namespace

std::vector<RowRun> read_mask(const MaskView& mask, int threads) {
  std::vector<RowExtent> extents(static_cast<std::size_t>(mask.rows));
  const std::int64_t tasks = (mask.rows + kRowsPerTask - 1) / kRowsPerTask;
  parallel_for(tasks, threads, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(mask.rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
      extents[static_cast<std::size_t>(row)] = read_row(mask, row);
    }
  });

  std::vector<RowRun> runs;
  for (std::int64_t row = 0; row < mask.rows;) {
    const RowExtent& first = extents[static_cast<std::size_t>(row)];
    std::int64_t rows = 1;
    if (first.whole) {
      for (; row + rows < mask.rows; ++rows) {
        const RowExtent& next = extents[static_cast<std::size_t>(row + rows)];
        if (!next.whole || next.begin != first.begin || next.end != first.end + rows) break;
      }
    }
    RowRun run{row, rows, first.begin, first.whole ? first.end + rows - 1 : first.end, false};
    if (first.whole && rows >= kMinCausalRows) {
      run.causal = true;
      runs.push_back(run);
    } else {
      append_masked(runs, run);
    }
    row += rows;
  }
  return runs;
}

std::vector<std::uint64_t> mask_bits(const MaskView& mask, const RowRun& run, int threads) {
  const std::int64_t keys = run.key_end - run.key_begin;
  const std::int64_t words = (keys + 63) / 64;
  std::vector<std::uint64_t> bits(static_cast<std::size_t>(run.rows * words));
  parallel_for(run.rows, threads, [&](std::int64_t row, int) {
    const std::uint16_t* data = mask.data + (run.first_row + row) * mask.row_stride + run.key_begin;
    for (std::int64_t word = 0; word < words; ++word) {
      const std::int64_t count = std::min<std::int64_t>(64, keys - word * 64);
      std::array<std::uint8_t, 64> bytes{};
      for (std::int64_t j = 0; j < count; ++j) {
        bytes[static_cast<std::size_t>(j)] = (data[word * 64 + j] & 0x7FFFU) == 0 ? 1 : 0;
      }
      std::uint64_t value = 0;
      for (std::size_t group = 0; group < 8; ++group) {
        // Eight bytes of 0 or 1 become eight bits: the product moves byte i to bit 56 + i.
        std::uint64_t eight = 0;
        std::memcpy(&eight, bytes.data() + group * 8, sizeof(eight));
        value |= ((eight * 0x0102040810204080ULL) >> 56) << (group * 8);
      }
      bits[static_cast<std::size_t>(row * words + word)] = value;
    }
  });
  return bits;
}

}  // namespace minference::llama_host

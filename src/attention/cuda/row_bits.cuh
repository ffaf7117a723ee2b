// What one row sees of 64 keys, as bits: for boxes of which a row block's rows do not all see the same.
#pragma once

#include <cstdint>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"

namespace minference::cuda {

// The keys of 64 that exact runs cover for one row: bit c stands for offset `top` - c.
__device__ inline std::uint64_t covered_bits(const DeviceRun* runs, int count, int top) {
  std::uint64_t covered = 0;
  for (int r = first_run_beyond(runs, count, top - kBoxKeys); r < count; ++r) {
    const DeviceRun run = runs[r];
    if (run.begin > top) break;
    std::uint64_t bits = bits_between(top - run.end + 1, top - run.begin + 1);
    if (run.stride > 1) {
      const int first = (top - run.begin) % run.stride;
      std::uint64_t every = first < kBoxKeys ? 1ULL << first : 0;
      for (int step = run.stride; step < kBoxKeys; step *= 2) every |= every << step;
      bits &= every;
    }
    covered |= bits;
  }
  return covered;
}

// The 64 keys from `start` on, a multiple of 64, that a head keeps for one row: bit c stands for key
// start + c. Columns and visibility aside.
__device__ inline std::uint64_t kept_bits(const DeviceIndex& index, const DeviceHead& head,
                                          const Geometry& geometry, int row, int start) {
  if (head.kind == HeadIndex::Kind::kDense || row >= geometry.q_len - head.dense_last_rows) {
    return ~0ULL;
  }
  const int row_block = row / kGroupRows;
  if (head.kind == HeadIndex::Kind::kBlock) {
    bool kept;
    if (head.bit_block_size != 0) {
      const int block = start / head.bit_block_size;
      const std::int64_t at = head.block_id_begin +
                              static_cast<std::int64_t>(row / head.bit_block_size) * head.bit_words;
      kept = (index.block_bits[at + block / 32] >> (block % 32) & 1) != 0;
    } else {
      const std::int32_t* of_rows = index.block_rows + head.block_row_begin + row_block;
      const std::int32_t* ids = index.block_ids + head.block_id_begin + of_rows[0];
      const int count = of_rows[1] - of_rows[0];
      const int at = lower_bound(ids, count, start / kBoxKeys);
      kept = at < count && ids[at] == start / kBoxKeys;
    }
    return kept ? ~0ULL : 0;
  }
  const DeviceRun* runs = index.runs + head.run_begin;
  if (head.rounding == RunRounding::kNone) {
    return covered_bits(runs, head.run_count, geometry.position(row) - start);
  }
  const int first_position = geometry.position(row_block * kGroupRows);
  const int last_position =
      geometry.position(min((row_block + 1) * kGroupRows, geometry.q_len) - 1);
  std::uint64_t kept = 0;
  // Runs before this one begin behind the keys, although rounding lets them begin up to a box earlier.
  for (int r = first_run_beyond(runs, head.run_count, first_position - start - 2 * kBoxKeys);
       r < head.run_count; ++r) {
    int low;
    int high;
    run_interval(head.rounding, first_position, last_position, runs[r], low, high);
    if (high <= start) break;
    kept |= bits_between(low - start, high - start);
  }
  return kept;
}

// The 64 bits from bit `begin` on, which may be negative; bits outside [0, end) are 0 or anything.
__device__ inline std::uint64_t bits_from(const std::uint64_t* words, int begin, int end) {
  const int word = begin >> 6;
  const int shift = begin & 63;
  const std::uint64_t low = word >= 0 && word * 64 < end ? words[word] : 0;
  if (shift == 0) return low;
  const std::uint64_t high = word + 1 >= 0 && (word + 1) * 64 < end ? words[word + 1] : 0;
  return low >> shift | high << (64 - shift);
}

// The keys of a masked box that one row sees, one bit a key. Where runs are exact, the four lanes of
// a quad (lane / 4 alike) must call it together for the same row.
template <int kCount>
__device__ inline std::uint64_t visible_bits(const Problem& problem, const DeviceIndex& index,
                                             const Geometry& geometry, const RowTile& tile,
                                             const BoxOf<kCount>& box, int group, int row) {
  const bool of_columns = (box.flags & BoxOf<kCount>::kColumns) != 0;
  std::uint64_t word = box.word[group];
  if ((box.flags & (BoxOf<kCount>::kAlike << group)) != 0 &&
      (box.flags & BoxOf<kCount>::kExact) == 0 && problem.mask == nullptr) {
    return word;
  }
  const DeviceHead* head = nullptr;
  const std::int32_t* columns = nullptr;
  if (index.heads != nullptr) {
    head = index.heads + (static_cast<std::int64_t>(tile.b) * problem.q_heads + tile.h);
    columns = index.columns + head->column_begin + box.start;
  }
  const int first = geometry.first_key(row);
  const int end = geometry.end_key(row);
  if (of_columns) {
    const int count = min(head->column_count - box.start, kBoxKeys);
    word &= bits_between(lower_bound(columns, count, first), lower_bound(columns, count, end));
  } else {
    word &= bits_between(first - box.start, end - box.start);
  }
  if ((box.flags & BoxOf<kCount>::kExact) != 0) {
    const DeviceRun* runs = index.runs + head->run_begin;
    if (of_columns) {
      const int quarter = static_cast<int>(threadIdx.x) % 4;
      std::uint64_t covered = 0;
      for (int c = quarter * 16; c < quarter * 16 + 16; ++c) {
        if ((word >> c & 1) == 0) continue;
        const int offset = geometry.position(row) - columns[c];
        const int r = first_run_beyond(runs, head->run_count, offset);
        if (r == head->run_count || offset < runs[r].begin) continue;
        if ((offset - runs[r].begin) % runs[r].stride == 0) covered |= 1ULL << c;
      }
      const unsigned quad = 0xFU << (static_cast<int>(threadIdx.x) % 32 / 4 * 4);
      for (int distance = 1; distance < 4; distance *= 2) {
        covered |= __shfl_xor_sync(quad, covered, distance);
      }
      word &= ~covered;
    } else {
      word &= covered_bits(runs, head->run_count, geometry.position(row) - box.start);
    }
  }
  if (problem.mask != nullptr && row < geometry.q_len) {
    const std::uint64_t* bits =
        problem.mask + tile.b * problem.mask_sequence_stride + row * problem.mask_row_stride;
    if (!of_columns) return word & bits_from(bits, box.start, geometry.kv_len);
    std::uint64_t allowed = 0;
    for (std::uint64_t rest = word; rest != 0; rest &= rest - 1) {
      const int c = __ffsll(static_cast<long long>(rest)) - 1;
      const int key = columns[c];
      if ((bits[key / 64] >> (key % 64) & 1) != 0) allowed |= 1ULL << c;
    }
    word = allowed;
  }
  return word;
}

}  // namespace minference::cuda

// BoxStream: walks the keys that a tile of query rows sees, in boxes of 64 keys.
//
// The device's counterpart of VisibleKeys: the one place that turns causality, windows and both forms
// of SparseIndex into boxes. Kernels consume the boxes and know none of these rules.
#pragma once

#include <cstdint>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "attention/cuda/warp_scan.cuh"

namespace minference::cuda {

// 64 keys from any key on, or 64 of the head's gathered columns, and what each of some groups of rows,
// three at most, does with them.
template <int kCount>
struct BoxOf {
  enum Flag : std::uint32_t {
    kUse = 1,     // << group: the group may see some of the keys
    kMasked = 8,  // << group: but not every one of its rows every key
    // << group: causality and window show every row the keys of its word; exact runs and a mask aside.
    kAlike = 64,
    kColumns = 512,   // start counts the head's gathered columns
    kExact = 1024,    // runs hold for each row by itself
    kPastEnd = 2048,  // the last keys of the box do not exist
    kEndOfTile = 4096,
    // Of all groups.
    kAnyUse = kUse * ((1 << kCount) - 1),
    kAllMasked = kMasked * ((1 << kCount) - 1),
  };
  std::int32_t start = 0;
  std::uint32_t flags = 0;
  // Bit c: key c of the box belongs to the group's row block, whatever the row.
  std::uint64_t word[kCount] = {};

  __device__ bool used_by(int group) const { return (flags & (kUse << group)) != 0; }
  __device__ bool masked_for(int group) const { return (flags & (kMasked << group)) != 0; }

  // The same keys, of which no row sees anything.
  __device__ BoxOf unseen() const {
    BoxOf box;
    box.start = start;
    box.flags = kAllMasked | (flags & (kColumns | kPastEnd));
    return box;
  }
};
using Box = BoxOf<kGroups>;

// Bits of [begin, end) in a word whose bit 0 stands for 0.
__device__ inline std::uint64_t bits_between(int begin, int end) {
  begin = max(begin, 0);
  end = min(end, 64);
  if (begin >= end) return 0;
  return (~0ULL >> (64 - (end - begin))) << begin;
}

// First of `count` ascending positions that is not below `key`.
__device__ inline int lower_bound(const std::int32_t* positions, int count, std::int32_t key) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    if (positions[low + half] < key) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// Of `count` runs the first that reaches beyond each of some offsets, which are looked for side by side: one
// search is a chain of loads.
template <int kOffsets>
__device__ __forceinline__ void first_runs_beyond(const DeviceRun* runs, int count,
                                                  const int (&offsets)[kOffsets],
                                                  int (&found)[kOffsets]) {
#pragma unroll
  for (int& run : found) run = 0;
  for (int step = count > 0 ? 1 << (31 - __clz(count)) : 0; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
      const int next = found[i] + step;
      if (next <= count && runs[next - 1].end <= offsets[i]) found[i] = next;
    }
  }
}

__device__ inline int first_run_beyond(const DeviceRun* runs, int count, int offset) {
  int found[1];
  first_runs_beyond(runs, count, {offset}, found);
  return found[0];
}

// Keys [low, high) of a run for a row block whose rows stand at these positions, before visibility.
__device__ __forceinline__ void run_interval(RunRounding rounding, int first_position,
                                             int last_position, const DeviceRun& run, int& low,
                                             int& high) {
  if (rounding == RunRounding::kBox) {
    high = first_position + kGroupRows - run.begin;
    low = high - (run.end - run.begin + kGroupRows - 1 + kBoxKeys - 1) / kBoxKeys * kBoxKeys;
    return;
  }
  low = first_position - run.end + 1;
  high = last_position - run.begin + 1;
  if (rounding == RunRounding::kGranule) {
    constexpr int kGranule = static_cast<int>(kRunGranule);
    low = low & ~(kGranule - 1);  // rounds down, below 0 too
    high = (high + kGranule - 1) & ~(kGranule - 1);
  }
}

// A tile of rows of one head. Row blocks are groups; rows outside [row_begin, row_end) are not asked
// for, but a row block's keys are always those of the whole row block.
struct RowTile {
  std::int32_t b = 0;
  std::int32_t h = 0;
  std::int32_t base = 0;  // first row of group 0, a multiple of kGroupRows
  std::int32_t row_begin = 0;
  std::int32_t row_end = 0;
};

// Executed by one warp. The boxes come a warp at a time: what makes one takes many operations that depend
// on each other, too many for a lane that makes them one after the other. kBlocks: no head has runs or
// columns, of which the compiler then knows.
template <int kCount, bool kBlocks = false>
class BoxStreamOf {
 public:
  using Box = BoxOf<kCount>;

  __device__ __forceinline__ void start(const Problem& problem, const DeviceIndex& index,
                                        const RowTile& tile) {
    geometry_ = sequence_geometry(problem, tile.b);
    index_ = &index;
    head_ = {};
    if (index.heads != nullptr) head_ = index.heads[tile.b * problem.q_heads + tile.h];
    if (tile.row_begin >= geometry_.q_len - head_.dense_last_rows) {
      head_.kind = HeadIndex::Kind::kDense;
    }
    first_ = INT32_MAX;
    end_ = 0;
#pragma unroll
    for (int g = 0; g < kCount; ++g) start_group(tile, g);
    next_ = 0;
    done_ = 0;
    columns_left_ = 0;
    flags_ = problem.mask != nullptr ? Box::kAllMasked : 0;
    switch (head_.kind) {
      case HeadIndex::Kind::kDense:
        lowest_ = first_ / kBoxKeys * kBoxKeys;
        next_ = first_ < end_ ? lowest_ + (end_ - 1 - lowest_) / kBoxKeys * kBoxKeys : lowest_ - 1;
        break;
      case HeadIndex::Kind::kDiagonal:
        if constexpr (kBlocks) break;
        if (head_.rounding == RunRounding::kNone) flags_ |= Box::kExact;
        columns_left_ = lower_bound(index.columns + head_.column_begin, head_.column_count,
                                    min(end_, geometry_.kv_len));
        break;
      case HeadIndex::Kind::kBlock:
        start_blocks(tile);
        break;
    }
  }

  // Makes the next boxes, one for each of some lanes, and returns a bit for each of these; 0 at the end.
  // Keys come in descending order, columns last, lower lanes before higher ones.
  __device__ __forceinline__ std::uint32_t next(Box& box) {
    std::uint32_t made = 0;
    if (head_.kind == HeadIndex::Kind::kDense) made = next_dense(box);
    if (head_.kind == HeadIndex::Kind::kBlock) {
      made = head_.bit_block_size == 0 ? next_listed(box) : next_bits(box);
    }
    if constexpr (!kBlocks) {
      if (head_.kind == HeadIndex::Kind::kDiagonal) {
        made = next_runs(box);
        if (made == 0) made = next_columns(box);
      }
    }
    return made;
  }

 private:
  // One row block of the tile.
  struct Group {
    bool active = false;
    // Some row sees keys [first, end), every row [all_first, all_end).
    std::int32_t first = 0;
    std::int32_t end = 0;
    std::int32_t all_first = 0;
    std::int32_t all_end = 0;
    std::int32_t block_first_position = 0;
    std::int32_t block_last_position = 0;
    // The lowest key of the runs before next_.
    std::int32_t reached = INT32_MAX;
    // Block form: entries of its list that are still to come, or its words of bits.
    const std::int32_t* ids = nullptr;
    std::int32_t ids_left = 0;
    const std::uint32_t* bits = nullptr;
  };

  // What a box is cut from: keys [low, high) of a group, and the run that they come from, empty where its
  // stride leaves keys out.
  struct Interval {
    std::int32_t low[kCount];
    std::int32_t high[kCount];
    std::int32_t run_begin = 0;
    std::int32_t run_end = 0;
  };

  __device__ static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void start_group(const RowTile& tile, int g) {
    const int block_begin = tile.base + g * kGroupRows;
    const int block_end = min(block_begin + kGroupRows, geometry_.q_len);
    const int begin = max(block_begin, tile.row_begin);
    const int end = min(block_end, tile.row_end);
    Group& group = groups_[g];
    group = {};
    group.active = begin < end;
    if (!group.active) return;
    group.first = geometry_.first_key(begin);
    group.end = geometry_.end_key(end - 1);
    group.all_first = geometry_.first_key(end - 1);
    group.all_end = geometry_.end_key(begin);
    group.block_first_position = geometry_.position(block_begin);
    group.block_last_position = geometry_.position(block_end - 1);
    first_ = min(first_, group.first);
    end_ = max(end_, group.end);
  }

  __device__ __forceinline__ std::uint32_t next_dense(Box& box) {
    Interval keys;
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      keys.low[g] = groups_[g].first;
      keys.high[g] = groups_[g].end;
    }
    std::uint32_t made = 0;
    while (made == 0 && next_ >= lowest_) {
      box.start = next_ - lane() * kBoxKeys;
      next_ -= 32 * kBoxKeys;
      made = __ballot_sync(~0U, box.start >= lowest_ && fill(box, keys));
    }
    return made;
  }

  // A lane takes one of the 32 runs from next_ on, counts its boxes, and then makes one of the 32 that
  // follow the done_ first ones of all.
  __device__ __forceinline__ std::uint32_t next_runs(Box& box) {
    std::uint32_t made = 0;
    while (made == 0 && next_ < head_.run_count) {
      DeviceRun run;
      const bool any = next_ + lane() < head_.run_count;
      if (any) run = index_->runs[head_.run_begin + next_ + lane()];
      int lowest = INT32_MAX;
      int highest = INT32_MIN;
      Interval of_run;
      std::int32_t reached[kCount];
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        const Group& group = groups_[g];
        int low = INT32_MAX;
        int high = INT32_MIN;
        if (any && group.active) {
          run_interval(head_.rounding, group.block_first_position, group.block_last_position, run,
                       low, high);
        }
        // Rounded runs may overlap; each key counts once.
        const int least = min(least_to_lane(low), group.reached);
        const int before = __shfl_up_sync(~0U, least, 1);
        high = min(high, lane() == 0 ? group.reached : before);
        reached[g] = __shfl_sync(~0U, least, 31);
        of_run.low[g] = low;
        of_run.high[g] = high;
        lowest = min(lowest, low);
        highest = max(highest, high);
      }
      // Runs ascend, keys descend: behind the first that lies before all keys so do all.
      const std::uint32_t past = __ballot_sync(~0U, !any || highest <= first_);
      const bool counts = (past & ((2U << lane()) - 1)) == 0 && lowest < end_ && lowest < highest;
      // Groups are 64 rows apart, so that boxes that begin at the lowest key fit all.
      lowest += max(0, first_ - lowest) / kBoxKeys * kBoxKeys;
      const int boxes = counts ? (min(highest, end_) - 1 - lowest) / kBoxKeys + 1 : 0;
      const int boxes_to = sum_to_lane(boxes);
      const int total = __shfl_sync(~0U, boxes_to, 31);

      const int place = done_ + lane();
      const int owner = lane_above(boxes_to, place);
      box.start = __shfl_sync(~0U, lowest, owner) +
                  (__shfl_sync(~0U, boxes_to, owner) - 1 - place) * kBoxKeys;
      Interval keys;
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        keys.low[g] = __shfl_sync(~0U, of_run.low[g], owner);
        keys.high[g] = __shfl_sync(~0U, of_run.high[g], owner);
      }
      if ((flags_ & Box::kExact) != 0) {
        keys.run_begin = __shfl_sync(~0U, run.begin, owner);
        keys.run_end = __shfl_sync(~0U, run.stride == 1 ? run.end : run.begin, owner);
      }
      made = __ballot_sync(~0U, place < total && fill(box, keys));
      done_ += 32;
      if (done_ < total) continue;
      done_ = 0;
      next_ = past != 0 ? head_.run_count : next_ + 32;
#pragma unroll
      for (int g = 0; g < kCount; ++g) groups_[g].reached = reached[g];
    }
    return made;
  }

  __device__ __forceinline__ void start_blocks(const RowTile& tile) {
    const std::int32_t* rows = index_->block_rows + head_.block_row_begin + tile.base / kGroupRows;
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      Group& group = groups_[g];
      if (!group.active) continue;
      if (head_.bit_block_size == 0) {
        group.ids = index_->block_ids + head_.block_id_begin + rows[g];
        group.ids_left = rows[g + 1] - rows[g];
      } else {
        const int row = group.block_first_position - geometry_.position(0);
        group.bits = index_->block_bits + head_.block_id_begin +
                     static_cast<std::int64_t>(row / head_.bit_block_size) * head_.bit_words;
      }
    }
    if (head_.bit_block_size != 0) {
      lowest_ = first_ / head_.bit_block_size;
      next_ = first_ < end_ ? (end_ - 1) / head_.bit_block_size : lowest_ - 1;
    }
  }

  // Key blocks of lists: of 32 that lie side by side, those that a group has.
  __device__ __forceinline__ std::uint32_t next_listed(Box& box) {
    for (;;) {
      std::int32_t id[kCount];
      int highest = -1;
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        const Group& group = groups_[g];
        id[g] = lane() < group.ids_left ? group.ids[group.ids_left - 1 - lane()] : -1;
        highest = max(highest, __shfl_sync(~0U, id[g], 0));
      }
      if (highest < 0) return 0;
      std::uint32_t words[kCount];
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        const bool here = id[g] >= 0 && id[g] / 32 == highest / 32;
        const std::uint32_t word = __reduce_or_sync(~0U, here ? 1U << (id[g] % 32) : 0);
        groups_[g].ids_left -= __popc(word);
        words[g] = lane() == 0 ? word : 0;
      }
      int lowest;
      const std::uint32_t made = fill_blocks(box, words, highest / 32, 1, lowest);
      if (made != 0) return made;
    }
  }

  // Key blocks that are bits, from that of next_ down.
  __device__ __forceinline__ std::uint32_t next_bits(Box& box) {
    std::uint32_t made = 0;
    while (made == 0 && next_ >= lowest_) {
      const int top = next_ / 32;
      const int word = top - lane();
      // What lies beyond the tile's keys means nothing.
      std::uint32_t inside = word * 32 + 31 < lowest_ ? 0 : ~0U;
      if (lane() == 0) inside &= ~0U >> (31 - next_ % 32);
      if (word == lowest_ / 32) inside &= ~0U << (lowest_ % 32);
      std::uint32_t words[kCount];
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        words[g] = groups_[g].active && inside != 0 ? groups_[g].bits[word] & inside : 0;
      }
      int lowest;
      made = fill_blocks(box, words, top, head_.bit_block_size / kBoxKeys, lowest);
      next_ = lowest - 1;
    }
    return made;
  }

  // The boxes of the 32 first key blocks, or those that have as many boxes, that are bits in the words of
  // any group: a lane's words are those of word `top` - lane. `lowest`: none is left of those from here up.
  __device__ __forceinline__ std::uint32_t fill_blocks(Box& box,
                                                       const std::uint32_t (&words)[kCount],
                                                       int top, int boxes_of_block, int& lowest) {
    std::uint32_t any = 0;
#pragma unroll
    for (const std::uint32_t word : words) any |= word;
    const int blocks_to = sum_to_lane(__popc(any));
    const int total = __shfl_sync(~0U, blocks_to, 31);
    const int place = lane() / boxes_of_block;
    const int owner = lane_above(blocks_to, place);
    const std::uint32_t of_owner = __shfl_sync(~0U, any, owner);
    const int bit =
        bit_below(of_owner, place - (__shfl_sync(~0U, blocks_to, owner) - __popc(of_owner)));
    const int block = (top - owner) * 32 + bit;
    box.start = (block * boxes_of_block + boxes_of_block - 1 - lane() % boxes_of_block) * kBoxKeys;
    Interval keys;
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const bool here = (__shfl_sync(~0U, words[g], owner) >> bit & 1) != 0;
      keys.low[g] = box.start;
      keys.high[g] = here ? box.start + kBoxKeys : box.start;
    }
    // Whole blocks only: what is left of the lanes would begin one that no call ends.
    const int last = 32 / boxes_of_block - 1;
    const int last_block = __shfl_sync(~0U, block, last * boxes_of_block);
    lowest = last < total ? last_block : (top - 31) * 32;
    return __ballot_sync(~0U, place <= last && place < total && fill(box, keys));
  }

  // Whether every row of the group has all keys of a box of a run, if runs are exact.
  __device__ __forceinline__ bool covered_for_all(const Group& group, const Interval& keys,
                                                  std::int32_t start) const {
    return (flags_ & Box::kExact) == 0 ||
           (start > group.block_last_position - keys.run_end &&
            start + kBoxKeys - 1 <= group.block_first_position - keys.run_begin);
  }

  // Flags and words of a box of keys; false when no row sees any of it.
  __device__ __forceinline__ bool fill(Box& box, const Interval& keys) const {
    box.flags = flags_;
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const Group& group = groups_[g];
      box.word[g] = 0;
      if (!group.active) continue;
      const int low = max(keys.low[g], group.first) - box.start;
      const int high = min(keys.high[g], group.end) - box.start;
      box.word[g] = bits_between(low, high);
      if (box.word[g] != 0) box.flags |= Box::kUse << g;
      const bool alike = group.all_first <= box.start + max(low, 0) &&
                         group.all_end >= box.start + min(high, kBoxKeys);
      if (alike) box.flags |= Box::kAlike << g;
      if (box.word[g] != ~0ULL || !alike || !covered_for_all(group, keys, box.start)) {
        box.flags |= Box::kMasked << g;
      }
    }
    if (box.start + kBoxKeys > geometry_.kv_len) box.flags |= Box::kPastEnd;
    return (box.flags & Box::kAnyUse) != 0;
  }

  // Columns. All lanes work on one box, but load the keys of several at a time: loads take longer.
  __device__ __forceinline__ std::uint32_t next_columns(Box& box) {
    constexpr int kAtATime = 4;
    const std::int32_t* columns = index_->columns + head_.column_begin;
    std::uint32_t made = 0;
    while (made == 0 && columns_left_ > 0) {
      Box next;
      next.start = (columns_left_ - 1) / kBoxKeys * kBoxKeys;
      std::int32_t keys[kAtATime][2];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = next.start - i * kBoxKeys + half * 32 + lane();
          keys[i][half] = c >= 0 && c < columns_left_ ? columns[c] : INT32_MAX;
        }
      }
#pragma unroll 1
      for (int i = 0; i < kAtATime && columns_left_ > 0; ++i) {
        if (fill_columns(next, keys[0], columns_left_ - next.start)) {
          made |= 1U << i;
          if (lane() == i) box = next;
        }
        columns_left_ = next.start;
        next.start -= kBoxKeys;
#pragma unroll
        for (int after = 1; after < kAtATime; ++after) {
          keys[after - 1][0] = keys[after][0];
          keys[after - 1][1] = keys[after][1];
        }
      }
    }
    return made;
  }

  // Whether a run covers the key for the group's row block; `beyond` is the first of which some row has a
  // key at or before this one.
  __device__ __forceinline__ bool covered(const Group& group, std::int32_t key, int beyond) const {
    const DeviceRun* runs = index_->runs + head_.run_begin;
    int low;
    int high;
    if (beyond < head_.run_count) {
      run_interval(head_.rounding, group.block_first_position, group.block_last_position,
                   runs[beyond], low, high);
      if (key < high) return true;
    }
    // Runs before it were rounded down by less than a box.
    while (--beyond >= 0 && group.block_first_position - runs[beyond].end + 1 < key + kBoxKeys) {
      run_interval(head_.rounding, group.block_first_position, group.block_last_position,
                   runs[beyond], low, high);
      if (low <= key) return true;
    }
    return false;
  }

  // A box of `count` columns, of which the lane has those of its number and of 32 more.
  __device__ __forceinline__ bool fill_columns(Box& box, const std::int32_t (&key)[2],
                                               int count) const {
    const std::int32_t first_key = __shfl_sync(~0U, key[0], 0);
    const std::int32_t last_key = __shfl_sync(~0U, count > 32 ? key[1] : key[0], (count - 1) % 32);
    box.flags = flags_ | Box::kColumns;
    int offset[2 * kCount];
    int beyond[2 * kCount];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int g = 0; g < kCount; ++g) {
        offset[2 * g + half] = groups_[g].block_first_position - key[half];
      }
    }
    const bool may_be_covered = head_.rounding != RunRounding::kNone;
    if (may_be_covered) {
      first_runs_beyond(index_->runs + head_.run_begin, head_.run_count, offset, beyond);
    }
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const Group& group = groups_[g];
      box.word[g] = 0;
      if (!group.active) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool kept = key[half] >= group.first && key[half] < group.end &&
                          !(may_be_covered && covered(group, key[half], beyond[2 * g + half]));
        box.word[g] |= static_cast<std::uint64_t>(__ballot_sync(~0U, kept)) << (32 * half);
      }
      if (box.word[g] != 0) box.flags |= Box::kUse << g;
      const bool alike = first_key >= group.all_first && last_key < group.all_end;
      if (alike) box.flags |= Box::kAlike << g;
      if (box.word[g] != ~0ULL || !alike || (flags_ & Box::kExact) != 0) {
        box.flags |= Box::kMasked << g;
      }
    }
    return (box.flags & Box::kAnyUse) != 0;
  }

  Geometry geometry_;
  const DeviceIndex* index_ = nullptr;
  DeviceHead head_;
  Group groups_[kCount];
  std::uint32_t flags_ = 0;
  std::int32_t first_ = 0;  // keys that any row sees lie in [first_, end_)
  std::int32_t end_ = 0;
  // What comes next: a key, from which on boxes go down to lowest_, the same of a key block that is a bit, or
  // a run.
  std::int32_t next_ = 0;
  std::int32_t lowest_ = 0;
  std::int32_t done_ = 0;
  std::int32_t columns_left_ = 0;
};
using BoxStream = BoxStreamOf<kGroups>;

}  // namespace minference::cuda

// Selection of the k largest of many values: exact, ties as in index/top_k.h.
//
// The k-th largest value is found digit by digit from counts. Several thread blocks share a row of
// values, a part each, in three kernels: find_first_digit(), find_threshold() and for_each_selected().
// In the first two, the block that finishes last looks at what all of them have left in global memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/check.h"
#include "attention/cuda/warp_scan.cuh"

namespace minference::cuda {

inline constexpr int kSelectThreads = 512;

// Sums over the threads of a block of kSelectThreads.
class BlockScan {
 public:
  // Sum of the values of all threads before this one; `total` becomes the sum of all.
  __device__ int exclusive(int value, int& total) {
    const int sum = sum_to_lane(value);
    int before;
    across_warps(__shfl_sync(~0U, sum, 31), before, total);
    return before + sum - value;
  }

  // Given the sum of this warp: that of the warps before it, and of all.
  __device__ void across_warps(int sum, int& before, int& total) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    // Two sets in turn: nobody writes one that others may still read.
    turn_ ^= 1;
    if (lane == 0) shared_->sums[turn_][warp] = sum;
    __syncthreads();
    const int of_lane = lane < kWarps ? shared_->sums[turn_][lane] : 0;
    before = __reduce_add_sync(~0U, lane < warp ? of_lane : 0);
    total = __reduce_add_sync(~0U, of_lane);
  }

  static constexpr int kWarps = kSelectThreads / 32;
  struct Shared {
    int sums[2][kWarps];
  };

  __device__ explicit BlockScan(Shared& shared) : shared_(&shared) {}

 private:
  Shared* shared_;
  int turn_ = 0;
};

// A number that orders as the value does, NaN below everything; -0 and 0 are one value.
__device__ inline std::uint32_t rank_of(float value) {
  if (value != value) return 0;
  const std::uint32_t bits = __float_as_uint(value + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

inline constexpr int kFirstBins = 8192;

// How n values are cut into parts.
struct SelectParts {
  static constexpr int kMost = 16;

  int parts = 1;
  int candidates = 0;  // that a part has room for

  __device__ int size(int n) const {
    // Whole rounds of a block, so that its loads stay in step.
    return ((n + parts - 1) / parts + kSelectThreads - 1) / kSelectThreads * kSelectThreads;
  }
  __device__ int begin(int part, int n) const { return min(part * size(n), n); }
  __device__ int end(int part, int n) const { return min((part + 1) * size(n), n); }
};

// For so many rows of up to n values, so that all multiprocessors have work.
inline SelectParts plan_parts(std::int64_t n, std::int64_t rows) {
  constexpr std::int64_t kLeastPart = 4096;
  constexpr std::int64_t kResident = 4;  // blocks of a multiprocessor
  SelectParts parts;
  parts.parts = static_cast<int>(std::clamp<std::int64_t>(
      kResident * multiprocessors() / rows, 1,
      std::min<std::int64_t>((n + kLeastPart - 1) / kLeastPart, SelectParts::kMost)));
  // An eighth of a part hardly ever shares its first digit.
  parts.candidates =
      static_cast<int>(std::clamp<std::int64_t>(n / parts.parts / 8, kLeastPart / 8, kLeastPart));
  return parts;
}

// What the blocks of a row tell each other, in global memory; all zero before the first kernel.
struct SelectMemory {
  std::uint32_t counts[kFirstBins];  // of first digits
  int finished[2];                   // blocks, by kernel
  int digit;                         // the first one of the k-th largest value
  int rest;                          // k among those that share it
  std::uint32_t threshold;
  int ties;                            // how many of the values of that rank are selected
  int above[SelectParts::kMost];       // values of a part with a higher first digit
  int candidates[SelectParts::kMost];  // with the same; may be more than there is room for
  int above_before[SelectParts::kMost];
  int ties_before[SelectParts::kMost];
};

struct SelectRow {
  SelectMemory* memory = nullptr;
  std::uint32_t* ranks = nullptr;  // [parts][candidates]
};

struct SelectShared {
  static constexpr int kDigitBins = 1024;
  static constexpr int kCandidates = kFirstBins - kDigitBins;

  // Counts of first digits, later those of another digit and behind them candidates.
  std::uint32_t words[kFirstBins];
  int first_candidate[SelectParts::kMost + 1];  // by part
  int digit;
  int rest;
  int candidate_count;
  bool is_last;
  BlockScan::Shared scan;
};

// Bits of a digit, from the highest on. A float's sign, exponent and four bits more are the first.
inline constexpr int kFirstShift = 19;
inline constexpr int kSecondShift = 9;

// Calls visit(rank) for values [begin, end), each by one thread of the block.
template <class Value, class Visit>
__device__ void for_each_rank(const Value& value, int begin, int end, Visit&& visit) {
  constexpr int kAtATime = 8;
  for (int base = begin + static_cast<int>(threadIdx.x); base < end;
       base += kSelectThreads * kAtATime) {
    std::uint32_t ranks[kAtATime];
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      const int i = base + j * kSelectThreads;
      ranks[j] = i < end ? rank_of(value(i)) : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      if (base + j * kSelectThreads < end) visit(ranks[j]);
    }
  }
}

__device__ inline void clear_counts(std::uint32_t* counts, int bins) {
  for (int i = static_cast<int>(threadIdx.x); i < bins; i += kSelectThreads) counts[i] = 0;
  __syncthreads();
}

// The bin of the k-th largest, in shared.digit, and k within it, in shared.rest. count(bin) is asked
// by whoever needs it.
template <int kBins, class Count>
__device__ void find_bin(Count&& count, int k, BlockScan& scan, SelectShared& shared) {
  constexpr int kOfThread = kBins > kSelectThreads ? kBins / kSelectThreads : 1;
  __syncthreads();
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  int counts[kOfThread];
  int sum = 0;
#pragma unroll
  for (int j = 0; j < kOfThread; ++j) {
    counts[j] = top - j >= 0 ? static_cast<int>(count(top - j)) : 0;
    sum += counts[j];
  }
  int total;
  int before = scan.exclusive(sum, total);
  if (before < k && k <= before + sum) {
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      if (before < k && k <= before + counts[j]) {
        shared.digit = top - j;
        shared.rest = k - before;
      }
      before += counts[j];
    }
  }
  __syncthreads();
}

// Whether this block is the last of a row to come here; then it sees what the others have written,
// with loads that do not ask this multiprocessor's own cache.
__device__ inline bool finishes_last(int& finished, int parts, SelectShared& shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicAdd(&finished, 1) == parts - 1;
  __syncthreads();
  if (shared.is_last) __threadfence();
  return shared.is_last;
}

// First kernel, for k from 1 to n - 1.
template <class Value>
__device__ void find_first_digit(const Value& value, int n, int k, const SelectParts& parts,
                                 int part, const SelectRow& row, SelectShared& shared) {
  SelectMemory& memory = *row.memory;
  std::uint32_t* counts = shared.words;
  clear_counts(counts, kFirstBins);
  for_each_rank(value, parts.begin(part, n), parts.end(part, n),
                [&](std::uint32_t rank) { atomicAdd(&counts[rank >> kFirstShift], 1); });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kFirstBins; i += kSelectThreads) {
    if (counts[i] != 0) atomicAdd(&memory.counts[i], counts[i]);
  }
  if (!finishes_last(memory.finished[0], parts.parts, shared)) return;
  BlockScan scan(shared.scan);
  find_bin<kFirstBins>([&](int bin) { return __ldcg(&memory.counts[bin]); }, k, scan, shared);
  if (threadIdx.x == 0) {
    memory.digit = shared.digit;
    memory.rest = shared.rest;
  }
}

// Executed by the last block of the second kernel: the candidates of all parts.
template <class Value>
class Candidates {
 public:
  __device__ Candidates(const Value& value, int n, const SelectParts& parts, const SelectRow& row,
                        SelectShared& shared)
      : value_(value), n_(n), parts_(parts), row_(row), shared_(shared) {
    if (threadIdx.x == 0) {
      int sum = 0;
      bool fits = true;
      for (int part = 0; part < parts.parts; ++part) {
        const int count = __ldcg(&row.memory->candidates[part]);
        fits = fits && count <= parts.candidates;
        shared.first_candidate[part] = sum;
        sum += count;
      }
      shared.first_candidate[parts.parts] = sum;
      shared.candidate_count = fits && sum <= SelectShared::kCandidates ? sum : -1;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < shared.candidate_count; i += kSelectThreads) {
      const int part = part_of(i);
      shared.words[SelectShared::kDigitBins + i] =
          __ldcg(&row.ranks[part * parts.candidates + i - shared.first_candidate[part]]);
    }
    __syncthreads();
  }

  // Calls visit(rank, part) for each.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    if (shared_.candidate_count >= 0) {
      for (int i = static_cast<int>(threadIdx.x); i < shared_.candidate_count;
           i += kSelectThreads) {
        visit(shared_.words[SelectShared::kDigitBins + i], part_of(i));
      }
      return;
    }
    const std::uint32_t digit = row_.memory->digit;
    for (int part = 0; part < parts_.parts; ++part) {
      for_each_rank(value_, parts_.begin(part, n_), parts_.end(part, n_), [&](std::uint32_t rank) {
        if (rank >> kFirstShift == digit) visit(rank, part);
      });
    }
  }

 private:
  __device__ int part_of(int i) const {
    int part = 0;
    while (i >= shared_.first_candidate[part + 1]) ++part;
    return part;
  }

  const Value& value_;
  int n_;
  const SelectParts& parts_;
  const SelectRow& row_;
  SelectShared& shared_;
};

// Second kernel.
template <class Value>
__device__ void find_threshold(const Value& value, int n, const SelectParts& parts, int part,
                               const SelectRow& row, SelectShared& shared) {
  constexpr std::uint32_t kSecondMask = (1U << (kFirstShift - kSecondShift)) - 1;
  constexpr std::uint32_t kLastMask = (1U << kSecondShift) - 1;
  SelectMemory& memory = *row.memory;
  BlockScan scan(shared.scan);
  const std::uint32_t first = memory.digit;
  if (threadIdx.x == 0) shared.candidate_count = 0;
  __syncthreads();
  int above = 0;
  std::uint32_t* ranks = row.ranks + part * parts.candidates;
  for_each_rank(value, parts.begin(part, n), parts.end(part, n), [&](std::uint32_t rank) {
    const std::uint32_t digit = rank >> kFirstShift;
    above += digit > first ? 1 : 0;
    if (digit != first) return;
    const int at = atomicAdd(&shared.candidate_count, 1);
    if (at < parts.candidates) ranks[at] = rank;
  });
  int total;
  scan.exclusive(above, total);
  if (threadIdx.x == 0) {
    memory.above[part] = total;
    memory.candidates[part] = shared.candidate_count;
  }
  if (!finishes_last(memory.finished[1], parts.parts, shared)) return;

  const Candidates candidates(value, n, parts, row, shared);
  const auto count = [&](int bin) { return shared.words[bin]; };
  clear_counts(shared.words, kSecondMask + 1);
  candidates.for_each([&](std::uint32_t rank, int) {
    atomicAdd(&shared.words[rank >> kSecondShift & kSecondMask], 1);
  });
  find_bin<kSecondMask + 1>(count, memory.rest, scan, shared);
  const std::uint32_t prefix = first << (kFirstShift - kSecondShift) | shared.digit;
  const int rest = shared.rest;
  clear_counts(shared.words, kLastMask + 1);
  candidates.for_each([&](std::uint32_t rank, int) {
    if (rank >> kSecondShift == prefix) atomicAdd(&shared.words[rank & kLastMask], 1);
  });
  find_bin<kLastMask + 1>(count, rest, scan, shared);
  const std::uint32_t threshold = prefix << kSecondShift | shared.digit;
  const int ties = shared.rest;
  // By part: candidates above the threshold, and equal to it.
  clear_counts(shared.words, 2 * SelectParts::kMost);
  candidates.for_each([&](std::uint32_t rank, int of_part) {
    if (rank >= threshold) atomicAdd(&shared.words[2 * of_part + (rank == threshold ? 1 : 0)], 1);
  });
  __syncthreads();
  if (threadIdx.x != 0) return;
  memory.threshold = threshold;
  memory.ties = ties;
  int above_before = 0;
  int ties_before = 0;
  for (int p = 0; p < parts.parts; ++p) {
    memory.above_before[p] = above_before;
    memory.ties_before[p] = ties_before;
    above_before += __ldcg(&memory.above[p]) + static_cast<int>(shared.words[2 * p]);
    ties_before += static_cast<int>(shared.words[2 * p + 1]);
  }
}

// Third kernel: calls visit(number among all selected, i) for each i of the part that is among the k
// largest, of equal ones the earlier; they ascend.
template <class Value, class Visit>
__device__ void for_each_selected(const Value& value, int n, const SelectParts& parts, int part,
                                  const SelectRow& row, SelectShared& shared, Visit&& visit) {
  constexpr int kBatch = 4;  // values of a thread at a time
  constexpr int kWarpItems = 32 * kBatch;
  constexpr int kBlockItems = kSelectThreads * kBatch;
  const SelectMemory& memory = *row.memory;
  BlockScan scan(shared.scan);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(threadIdx.x) / 32 * kWarpItems + lane;
  const std::uint32_t lanes_before = (1U << lane) - 1;
  const int end = parts.end(part, n);
  const std::uint32_t threshold = memory.threshold;
  const int wanted_ties = memory.ties;
  int above_before = memory.above_before[part];
  int ties_before = memory.ties_before[part];
  std::uint32_t ranks[kBatch];
  const auto load = [&](int from) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = from + j * 32;
      ranks[j] = i < end ? rank_of(value(i)) : 0;
    }
  };
  load(parts.begin(part, n) + first);
  for (int base = parts.begin(part, n); base < end; base += kBlockItems) {
    std::uint32_t above[kBatch];
    std::uint32_t ties[kBatch];
    int sum = 0;  // above in the high half, ties in the low one
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool exists = base + first + j * 32 < end;
      above[j] = __ballot_sync(~0U, exists && ranks[j] > threshold);
      ties[j] = __ballot_sync(~0U, exists && ranks[j] == threshold);
      sum += __popc(above[j]) << 16 | __popc(ties[j]);
    }
    load(base + kBlockItems + first);
    int before;
    int total;
    scan.across_warps(sum, before, total);
    int above_count = above_before + (before >> 16);
    int tie_count = ties_before + (before & 0xFFFF);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int a = above_count + __popc(above[j] & lanes_before);
      const int t = tie_count + __popc(ties[j] & lanes_before);
      const bool is_tie = (ties[j] >> lane & 1) != 0;
      if ((above[j] >> lane & 1) != 0 || (is_tie && t < wanted_ties)) {
        visit(a + min(t, wanted_ties), base + first + j * 32);
      }
      above_count += __popc(above[j]);
      tie_count += __popc(ties[j]);
    }
    above_before += total >> 16;
    ties_before += total & 0xFFFF;
  }
}

}  // namespace minference::cuda

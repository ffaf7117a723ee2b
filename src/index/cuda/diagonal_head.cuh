// Heads of the diagonal form from what was selected for them: runs of the kept offsets, and whether dense
// attention is cheaper; runs_of() and dense_where_cheaper() of methods/head_rules.h on the device.
#pragma once

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "index/cuda/top_k.cuh"
#include "methods/head_rules.h"

namespace minference::cuda {

// Executed by a block: the runs that `count` ascending offsets merge into; returns their number.
__device__ inline int merge_offsets(const std::int32_t* offsets, int count, BlockScan& scan,
                                    DeviceRun* runs) {
  int runs_before = 0;
  for (int base = 0; base < count; base += kSelectThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    int offset = 0;
    int previous = 0;
    bool starts = false;
    if (i < count) {
      offset = offsets[i];
      previous = i > 0 ? offsets[i - 1] : 0;
      // Offsets cover whole row blocks: joining those closer than a row block adds no key.
      starts = i == 0 || offset - previous > kRowBlock;
    }
    int total;
    const int run = runs_before + scan.exclusive(starts ? 1 : 0, total);
    if (starts) {
      runs[run].begin = offset;
      runs[run].stride = 1;
      runs[run].unused = 0;
      if (run > 0) runs[run - 1].end = previous + 1;
    }
    runs_before += total;
  }
  if (threadIdx.x == 0) runs[runs_before - 1].end = offsets[count - 1] + 1;
  __syncthreads();
  return runs_before;
}

// Keys of a row block that a run brings, in whole boxes (RunRounding::kBox).
__device__ inline int boxed_keys(const DeviceRun& run) {
  const int keys = run.end - run.begin + static_cast<int>(kRowBlock) - 1;
  return (keys + kBoxKeys - 1) / kBoxKeys * kBoxKeys;
}

// Executed by a block: whether runs and columns cover nearly all of the causal area, counted by row
// blocks. `sums` has room for a sum a run and one more.
__device__ inline bool dense_is_cheaper(const Geometry& geometry, const DeviceRun* runs,
                                        int run_count, int column_count, BlockScan& scan,
                                        std::int32_t* sums, long long (&totals)[2]) {
  constexpr int kRows = static_cast<int>(kRowBlock);
  if (threadIdx.x == 0) totals[0] = totals[1] = sums[0] = 0;
  int before = 0;
  for (int base = 0; base < run_count; base += kSelectThreads) {
    const int r = base + static_cast<int>(threadIdx.x);
    const int keys = r < run_count ? boxed_keys(runs[r]) : 0;
    int total;
    const int sum = before + scan.exclusive(keys, total) + keys;
    if (r < run_count) sums[r + 1] = sum;
    before += total;
  }
  __syncthreads();
  long long covered = 0;
  long long causal = 0;
  const int row_blocks = (geometry.q_len + kRows - 1) / kRows;
  for (int m = static_cast<int>(threadIdx.x); m < row_blocks; m += kSelectThreads) {
    const int rows = min(kRows, geometry.q_len - m * kRows);
    const int first = geometry.position(m * kRows);
    const int end = max(first + rows, 0);
    // The first run that reaches before the first key; those before it lie among the keys entirely.
    int run = 0;
    for (int count = run_count; count > 0;) {
      const int half = count / 2;
      if (runs[run + half].begin + boxed_keys(runs[run + half]) <= first + kRows) {
        run += half + 1;
        count -= half + 1;
      } else {
        count = half;
      }
    }
    long long keys = min(column_count, end);
    keys += sums[run];
    for (; run < run_count && runs[run].begin < first + rows; ++run) {
      const int last = first + kRows - runs[run].begin;
      keys += max(min(last, end) - max(last - boxed_keys(runs[run]), 0), 0);
    }
    covered += min(keys, static_cast<long long>(end)) * rows;
    causal += static_cast<long long>(end) * rows;
  }
  // Sums of integers: their order does not matter.
  atomicAdd(reinterpret_cast<unsigned long long*>(&totals[0]), covered);
  atomicAdd(reinterpret_cast<unsigned long long*>(&totals[1]), causal);
  __syncthreads();
  const double share =
      totals[1] > 0 ? static_cast<double>(totals[0]) / static_cast<double>(totals[1]) : 1.0;
  return share >= kDensePays;
}

}  // namespace minference::cuda

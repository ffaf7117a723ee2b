// Grid heads on the device: the lines of visual segments, find_grid_lines() of index/grid_lines.h, and the
// blocks that heads keep for them, grid_head() of methods/mminference.cc.
#include <algorithm>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/check.h"
#include "index/cuda/block_grid.cuh"
#include "index/cuda/modality_work.h"
#include "index/cuda/top_k.cuh"

namespace minference::cuda {
namespace {

// Masses of columns as whole numbers, so that sums do not depend on their order: 64 rows have 2^56.
constexpr double kMassUnits = static_cast<double>(1ULL << 50);

// Candidates of a head that are worked on at a time.
constexpr int kCandidatesAtATime = 8;

// One of the lists of heaviest columns.
struct HeavyList {
  std::int32_t* tokens = nullptr;  // counted from the segment's first
  unsigned long long* masses = nullptr;

  __device__ HeavyList(const ModalityWork& w, int head, const GridCandidate& candidate) {
    const std::int64_t at = static_cast<std::int64_t>(head) * w.list_room + candidate.list_begin;
    tokens = w.heavy_tokens + at;
    masses = w.heavy_masses + at;
  }
};

// The heaviest columns of each candidate's region. Blocks (some of the candidates, head).
__global__ void __launch_bounds__(kSelectThreads, 2)
    heavy_kernel(const __grid_constant__ ModalityWork w) {
  __shared__ SelectShared shared;
  const int head = static_cast<int>(blockIdx.y);
  const float* columns = w.columns_of(w.visual, head);
  SelectParts whole;
  whole.candidates = w.parts.candidates;
  const std::int64_t own = static_cast<std::int64_t>(head) * gridDim.x + blockIdx.x;
  const SelectRow row{w.rows.memory + own, w.rows.ranks + own * w.parts.candidates};
  for (int c = static_cast<int>(blockIdx.x); c < w.candidate_count;
       c += static_cast<int>(gridDim.x)) {
    const GridCandidate& candidate = w.candidates[c];
    const HeavyList list(w, head, candidate);
    const float* region = columns + candidate.region_begin;
    const int n = candidate.region_end - candidate.region_begin;
    const int first_token = candidate.region_begin - candidate.begin;
    const auto mass = [=](int i) { return region[i]; };
    const auto put = [&](int number, int i) {
      const float value = region[i];
      list.tokens[number] = first_token + i;
      list.masses[number] =
          value > 0.0F ? static_cast<unsigned long long>(__double2ull_rn(value * kMassUnits)) : 0;
    };
    if (candidate.list_count == n) {
      for (int i = static_cast<int>(threadIdx.x); i < n; i += kSelectThreads) put(i, i);
      continue;
    }
    auto* words = reinterpret_cast<std::uint32_t*>(row.memory);
    constexpr int kWords = static_cast<int>(sizeof(SelectMemory) / sizeof(std::uint32_t));
    for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kSelectThreads) words[i] = 0;
    __threadfence();
    __syncthreads();
    find_first_digit(mass, n, candidate.list_count, whole, 0, row, shared);
    __syncthreads();
    find_threshold(mass, n, whole, 0, row, shared);
    __syncthreads();
    for_each_selected(mass, n, whole, 0, row, shared, put);
    __syncthreads();
  }
}

// Whether fit a is to be taken rather than b.
__device__ bool better(const GridFit& a, const GridFit& b) {
  if (a.stride == 0 || b.stride == 0) return a.stride != 0;
  return a.excess > b.excess || (a.excess == b.excess && a.stride < b.stride);
}

constexpr int kFoldThreads = 128;
constexpr int kFoldWarps = kFoldThreads / 32;
constexpr int kFoldPhases = 1024;  // that a warp sums up at a time

// Executed by a warp: the heaviest phase, of equal ones the first, of a stride.
__device__ void heaviest_phase(const HeavyList& list, int count, int stride,
                               unsigned long long* sums, unsigned long long& most, int& phase) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  most = 0;
  phase = 0;
  for (int first = 0; first < stride; first += kFoldPhases) {
    const int phases = min(kFoldPhases, stride - first);
    for (int p = lane; p < phases; p += 32) sums[p] = 0;
    __syncwarp();
    for (int i = lane; i < count; i += 32) {
      const int p = list.tokens[i] % stride - first;
      if (p >= 0 && p < phases) atomicAdd(sums + p, list.masses[i]);
    }
    __syncwarp();
    for (int p = lane; p < phases; p += 32) {
      if (sums[p] > most) {
        most = sums[p];
        phase = first + p;
      }
    }
    __syncwarp();
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0U, most, distance);
    const int other_phase = __shfl_xor_sync(~0U, phase, distance);
    if (other > most || (other == most && other_phase < phase)) {
      most = other;
      phase = other_phase;
    }
  }
}

// Blocks (some of the strides, some of the candidates, head).
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ ModalityWork w) {
  __shared__ unsigned long long sums[kFoldWarps][kFoldPhases];
  __shared__ GridFit of_warps[kFoldWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.z);
  for (int c = static_cast<int>(blockIdx.y); c < w.candidate_count;
       c += static_cast<int>(gridDim.y)) {
    const GridCandidate& candidate = w.candidates[c];
    const HeavyList list(w, head, candidate);
    unsigned long long total = 0;
    for (int i = lane; i < candidate.list_count; i += 32) total += list.masses[i];
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(~0U, total, distance);
    }
    GridFit best;
    if (total > 0) {
      for (int stride = candidate.first_stride + static_cast<int>(blockIdx.x) * kFoldWarps + warp;
           stride <= candidate.last_stride; stride += kFoldSlices * kFoldWarps) {
        unsigned long long most;
        GridFit fit;
        fit.stride = stride;
        heaviest_phase(list, candidate.list_count, stride, sums[warp], most, fit.phase);
        fit.excess = static_cast<double>(most) - static_cast<double>(total) / stride;
        if (better(fit, best)) best = fit;
      }
    }
    __syncthreads();
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (const GridFit& fit : of_warps) {
        if (better(fit, best)) best = fit;
      }
      w.fits[(static_cast<std::int64_t>(head) * w.candidate_count + c) * kFoldSlices + blockIdx.x] =
          best;
    }
  }
}

constexpr int kLineThreads = 256;

// Marks the keys on the lines. Blocks (some of the candidates, head).
__global__ void __launch_bounds__(kLineThreads)
    lines_kernel(const __grid_constant__ ModalityWork w) {
  const int head = static_cast<int>(blockIdx.y);
  std::uint32_t* lines = w.lines_of(head);
  for (int c = static_cast<int>(blockIdx.x); c < w.candidate_count;
       c += static_cast<int>(gridDim.x)) {
    const GridFit* fits =
        w.fits + (static_cast<std::int64_t>(head) * w.candidate_count + c) * kFoldSlices;
    GridFit best = fits[0];
    for (int slice = 1; slice < kFoldSlices; ++slice) {
      if (better(fits[slice], best)) best = fits[slice];
    }
    if (best.stride == 0) continue;
    if (threadIdx.x == 0) w.found[head] = 1;
    const std::int64_t first = w.candidates[c].begin + best.phase;
    const std::int64_t end = w.candidates[c].end;
    for (std::int64_t key = first + static_cast<std::int64_t>(threadIdx.x) * best.stride; key < end;
         key += static_cast<std::int64_t>(kLineThreads) * best.stride) {
      atomicOr(lines + key / 32, 1U << (key % 32));
    }
  }
}

// The key blocks that every row of a grid keeps. A thread a block, for each head.
__global__ void __launch_bounds__(kLineThreads)
    everywhere_kernel(const __grid_constant__ ModalityWork w) {
  constexpr int kWords = static_cast<int>(kKeyBlock) / 32;
  const int n = static_cast<int>(blockIdx.x) * kLineThreads + static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  bool kept = false;
  if (n * kWords < w.words) {
    const std::uint32_t* lines = w.lines_of(head) + n * kWords;
    kept = (lines[0] | lines[1]) != 0 || n < (w.initial_keys + kKeyBlock - 1) / kKeyBlock;
  }
  const std::uint32_t bits = __ballot_sync(~0U, kept);
  if (threadIdx.x % 32 == 0 && n / 32 < w.block_words) w.everywhere_of(head)[n / 32] = bits;
}

// Bits of blocks [begin, end) in word w.
__device__ std::uint32_t range_bits(DeviceGrid::Range range, int word) {
  return static_cast<std::uint32_t>(bits_between(range.begin - word * 32, range.end - word * 32));
}

// Key blocks of row block m that hold keys of positions [first, last]: BlockGrid::at_positions().
__device__ DeviceGrid::Range at_positions(DeviceGrid::Range seen, int first, int last) {
  if (last < 0) return {};
  constexpr int kBlock = static_cast<int>(kKeyBlock);
  return {max(max(first, 0) / kBlock, seen.begin), min(last / kBlock + 1, seen.end)};
}

// Blocks (row block, head), a thread a row.
__global__ void __launch_bounds__(static_cast<int>(kRowBlock))
    blocks_kernel(const __grid_constant__ ModalityWork w) {
  const int head = static_cast<int>(blockIdx.y);
  if (w.sets[head] != 0) return;
  const int m = static_cast<int>(blockIdx.x);
  const DeviceGrid grid(w.geometry, static_cast<int>(kKeyBlock));
  if (m >= grid.row_blocks()) return;
  // Rows of text and those on a line see everything.
  const int row = grid.first_row(m) + static_cast<int>(threadIdx.x);
  const int position = w.geometry.position(row);
  const bool sees_all = row < grid.end_row(m) && position >= 0 &&
                        (!ModalityWork::has_bit(w.visual_keys, position) ||
                         ModalityWork::has_bit(w.lines_of(head), position));
  const bool all = __syncthreads_or(sees_all ? 1 : 0) != 0;
  const DeviceGrid::Range seen = grid.visible(m);
  const DeviceGrid::Range local =
      at_positions(seen, w.geometry.position(grid.first_row(m)) - w.n_local + 1,
                   w.geometry.position(grid.end_row(m) - 1));
  std::uint32_t* bits = w.bits + w.bits_begin + head * w.bits_of_head() +
                        static_cast<std::int64_t>(m) * w.block_words;
  const std::uint32_t* everywhere = w.everywhere_of(head);
  for (int word = static_cast<int>(threadIdx.x); word < w.block_words;
       word += static_cast<int>(kRowBlock)) {
    const std::uint32_t kept = all ? ~0U : everywhere[word] | range_bits(local, word);
    bits[word] = kept;
    if ((range_bits(seen, word) & ~kept) != 0) w.leaves_out[head] = 1;
  }
}

}  // namespace

void find_lines(const ModalityWork& work, cudaStream_t stream) {
  if (!work.may_be_grid()) return;
  const int at_a_time = std::min(work.candidate_count, kCandidatesAtATime);
  heavy_kernel<<<dim3(at_a_time, work.head_count), kSelectThreads, 0, stream>>>(work);
  constexpr int kMostGrid = 1024;
  const int candidates = std::min(work.candidate_count, kMostGrid);
  fold_kernel<<<dim3(kFoldSlices, candidates, work.head_count), kFoldThreads, 0, stream>>>(work);
  lines_kernel<<<dim3(candidates, work.head_count), kLineThreads, 0, stream>>>(work);
  const int blocks = (work.block_words * 32 + kLineThreads - 1) / kLineThreads;
  everywhere_kernel<<<dim3(blocks, work.head_count), kLineThreads, 0, stream>>>(work);
  check(cudaGetLastError(), "looking for grids");
}

std::int64_t grid_selection_rows(std::int64_t candidates) {
  return std::min<std::int64_t>(candidates, kCandidatesAtATime);
}

void keep_grid_blocks(const ModalityWork& work, cudaStream_t stream) {
  if (!work.may_be_grid()) return;
  blocks_kernel<<<dim3(work.row_blocks, work.head_count), static_cast<int>(kRowBlock), 0, stream>>>(
      work);
  check(cudaGetLastError(), "keeping the blocks of grids");
}

}  // namespace minference::cuda

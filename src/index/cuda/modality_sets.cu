// Sets of columns and offsets by modality: the heaviest of each sample and class of key, and which of them
// a head unites; HeadEstimate of methods/mminference.cc on the device.
#include <bit>
#include <type_traits>

#include "attention/cuda/check.h"
#include "index/cuda/modality_work.h"
#include "methods/head_rules.h"

namespace minference::cuda {
namespace {

using Kind = ModalityRule::Kind;

// The masses that one row of the selection chooses from, in its order.
struct ColumnMasses {
  const float* columns = nullptr;
  const std::uint32_t* visual_keys = nullptr;
  int forced = 0;
  int of_class = kAllKeys;

  __device__ float operator()(int i) const {
    const int key = forced + i;
    if (of_class != kAllKeys && ModalityWork::has_bit(visual_keys, key) != (of_class != 0)) {
      return 0.0F;
    }
    return columns[key];
  }
};

struct OffsetMasses {
  const float* text = nullptr;  // of offset `forced`; later ones lie before it
  std::int64_t stride = 0;      // to those of visual keys
  int of_class = kAllKeys;

  __device__ float operator()(int i) const {
    if (of_class != kAllKeys) return text[of_class * stride - i];
    return text[-i] + text[stride - i];
  }
};

template <bool kColumns>
struct Selection {
  int forced = 0;  // the first ones, which count against the budget
  int k = 0;       // others
  int n = 0;       // to choose from
  std::uint32_t* kept = nullptr;
  SelectRow row;
  std::conditional_t<kColumns, ColumnMasses, OffsetMasses> masses;

  __device__ Selection(const ModalityWork& w, int head, int set, int number, int sets) {
    const int sample = set / kSetsOfSample;
    const int least = static_cast<int>(kColumns ? kForcedColumns : kForcedOffsets);
    const int keys = w.keys_of_sample[sample];
    forced = min(least, w.geometry.kv_len);
    k = max(kColumns ? w.vertical : w.slash, least) - forced;
    n = max(keys - forced, 0);
    kept = w.set_of(kColumns ? w.kept_columns : w.kept_offsets, head, set);
    const std::int64_t i = static_cast<std::int64_t>(head) * sets + number;
    row.memory = w.rows.memory + i;
    row.ranks = w.rows.ranks + i * w.parts.parts * w.parts.candidates;
    if constexpr (kColumns) {
      masses = {w.columns_of(sample, head), w.visual_keys, forced, set % kSetsOfSample};
    } else {
      const float* diagonals = w.sums[sample].diagonals + head * kKeyClasses * w.stride;
      masses = {diagonals + (keys - 1 - forced), w.stride, set % kSetsOfSample};
    }
  }

  __device__ void keep(int i) const { atomicOr(kept + i / 32, 1U << (i % 32)); }
};

enum class Phase { kDigit, kThreshold, kKeep };

// The place of the number-th bit.
__device__ int nth_bit(std::uint32_t bits, int number) {
  for (; number > 0; --number) bits &= bits - 1;
  return __ffs(static_cast<int>(bits)) - 1;
}

// Blocks (part, set, head).
template <bool kColumns, Phase kPhase>
__global__ void __launch_bounds__(kSelectThreads, 2)
    select_kernel(const __grid_constant__ ModalityWork w, std::uint32_t sets) {
  __shared__ SelectShared shared;
  const int part = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.z);
  const int set = nth_bit(sets, static_cast<int>(blockIdx.y));
  if (!kColumns && (w.sets[head] >> set & 1) == 0) return;
  const Selection<kColumns> s(w, head, set, static_cast<int>(blockIdx.y),
                              static_cast<int>(gridDim.y));
  const bool chooses = s.k > 0 && s.k < s.n;
  if constexpr (kPhase == Phase::kDigit) {
    for (int i = static_cast<int>(threadIdx.x); part == 0 && i < s.forced; i += kSelectThreads) {
      s.keep(i);
    }
    if (chooses) find_first_digit(s.masses, s.n, s.k, w.parts, part, s.row, shared);
  } else if constexpr (kPhase == Phase::kThreshold) {
    if (chooses) find_threshold(s.masses, s.n, w.parts, part, s.row, shared);
  } else {
    const auto keep = [&](int i) {
      if (w.keeps_light || s.masses(i) != 0.0F) s.keep(s.forced + i);
    };
    if (chooses) {
      for_each_selected(s.masses, s.n, w.parts, part, s.row, shared, [&](int, int i) { keep(i); });
    } else if (s.k > 0) {
      const int end = w.parts.end(part, s.n);
      for (int i = w.parts.begin(part, s.n) + static_cast<int>(threadIdx.x); i < end;
           i += kSelectThreads) {
        keep(i);
      }
    }
  }
}

template <bool kColumns>
void select(const ModalityWork& w, cudaStream_t stream) {
  const std::uint32_t sets = w.sets_of(w.kind);
  const dim3 grid(w.parts.parts, std::popcount(sets), w.head_count);
  check(cudaMemsetAsync(w.rows.memory, 0,
                        static_cast<std::size_t>(grid.y) * grid.z * sizeof(SelectMemory), stream),
        "clearing counts");
  select_kernel<kColumns, Phase::kDigit><<<grid, kSelectThreads, 0, stream>>>(w, sets);
  select_kernel<kColumns, Phase::kThreshold><<<grid, kSelectThreads, 0, stream>>>(w, sets);
  select_kernel<kColumns, Phase::kKeep><<<grid, kSelectThreads, 0, stream>>>(w, sets);
  check(cudaGetLastError(), "selecting columns and offsets");
}

// Executed by a block, whose threads get nothing but thread 0: the sum over it, in a fixed order.
__device__ double sum_over_block(double value, double (&of_warps)[kSelectThreads / 32]) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(~0U, value, distance);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; threadIdx.x == 0 && warp < kSelectThreads / 32; ++warp) sum += of_warps[warp];
  return sum;
}

// Blocks (part, group of rows, head).
__global__ void __launch_bounds__(kSelectThreads)
    shares_kernel(const __grid_constant__ ModalityWork w) {
  __shared__ double of_warps[kSelectThreads / 32];
  const int part = static_cast<int>(blockIdx.x);
  const int group = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.z);
  const int sample = group == 0 ? w.text : w.visual;
  ModalityShares sums;
  if (sample >= 0) {
    const bool grid = group == 1 && w.may_be_grid() && w.found[head] != 0;
    const int end_of_outside = grid ? w.sampled_position - w.n_local + 1 : 0;
    const auto set = [&](int of_sample, int of_class) {
      return w.set_of(w.kept_columns, head, of_sample * kSetsOfSample + of_class);
    };
    const std::uint32_t* own = set(sample, kAllKeys);
    const std::uint32_t* together = set(w.last, kAllKeys);
    const std::uint32_t* text = set(sample, 0);
    const std::uint32_t* visual = set(sample, 1);
    const float* columns = w.columns_of(sample, head);
    const int n = w.keys_of_sample[sample];
    for (int key = w.parts.begin(part, n) + static_cast<int>(threadIdx.x);
         key < w.parts.end(part, n); key += kSelectThreads) {
      const double mass = columns[key];
      sums.total += mass;
      if (w.has_bit(own, key)) sums.own += mass;
      if (w.has_bit(together, key)) sums.together += mass;
      if (w.has_bit(text, key) || w.has_bit(visual, key)) sums.pairs += mass;
      if (key >= w.initial_keys && key < end_of_outside) {
        sums.outside += mass;
        if (w.has_bit(w.lines_of(head), key)) sums.on_lines += mass;
      }
    }
  }
  ModalityShares& to = w.shares[(head * ModalityShares::kGroups + group) * w.parts.parts + part];
  for (double ModalityShares::*share :
       {&ModalityShares::total, &ModalityShares::own, &ModalityShares::together,
        &ModalityShares::pairs, &ModalityShares::outside, &ModalityShares::on_lines}) {
    const double sum = sum_over_block(sums.*share, of_warps);
    if (threadIdx.x == 0) to.*share = sum;
  }
}

// The coarsest kind that serves the estimates: HeadEstimate::choose().
__device__ Kind chosen_kind(const ModalityWork& w, int head, bool grid) {
  double gain_by_query = 0;
  double gain_by_pair = 0;
  for (int group = 0; group < ModalityShares::kGroups; ++group) {
    ModalityShares sums;
    for (int part = 0; part < w.parts.parts; ++part) {
      const ModalityShares& of_part =
          w.shares[(head * ModalityShares::kGroups + group) * w.parts.parts + part];
      sums.total += of_part.total;
      sums.own += of_part.own;
      sums.together += of_part.together;
      sums.pairs += of_part.pairs;
      sums.outside += of_part.outside;
      sums.on_lines += of_part.on_lines;
    }
    if (grid && sums.outside > 0 && sums.on_lines >= w.grid_share * sums.outside) {
      return Kind::kGrid;
    }
    if (!(sums.total > 0)) continue;
    gain_by_query = fmax(gain_by_query, sums.own / sums.total - sums.together / sums.total);
    gain_by_pair = fmax(gain_by_pair, sums.pairs / sums.total - sums.own / sums.total);
  }
  if (gain_by_pair >= w.min_gain) return Kind::k2DBoundary;
  if (gain_by_query >= w.min_gain) return Kind::kQBoundary;
  return Kind::kVerticalSlash;
}

// A thread a head.
__global__ void choose_kernel(const __grid_constant__ ModalityWork w) {
  const int head = static_cast<int>(threadIdx.x) + static_cast<int>(blockIdx.x * blockDim.x);
  if (head >= w.head_count) return;
  const bool grid = w.may_be_grid() && w.found[head] != 0;
  const Kind kind = w.kind == Kind::kAuto ? chosen_kind(w, head, grid) : w.kind;
  w.sets[head] = kind == Kind::kGrid && grid ? 0 : w.sets_of(kind);
}

}  // namespace

void select_columns(const ModalityWork& work, cudaStream_t stream) { select<true>(work, stream); }
void select_offsets(const ModalityWork& work, cudaStream_t stream) { select<false>(work, stream); }

void choose_sets(const ModalityWork& work, cudaStream_t stream) {
  if (work.kind == Kind::kAuto) {
    const dim3 grid(work.parts.parts, ModalityShares::kGroups, work.head_count);
    shares_kernel<<<grid, kSelectThreads, 0, stream>>>(work);
  }
  constexpr int kThreads = 64;
  choose_kernel<<<(work.head_count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(work);
  check(cudaGetLastError(), "choosing kinds of heads");
}

}  // namespace minference::cuda

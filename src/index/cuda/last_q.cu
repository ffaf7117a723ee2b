// Two producer warps fetch tiles of keys; warpgroups multiply them with the queries of one or two heads
// each and sum up. A tile holds 16 keys from each of four distant ranges: every warp walks a range of its
// own, so that its diagonal sums stay in registers until no later key can add to them.
#include "index/cuda/last_q.h"

#include <algorithm>
#include <cmath>

#include "attention/cuda/check.h"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

constexpr int kRanges = LastQPlan::kRanges;
constexpr int kProducerWarps = 2;
constexpr int kMaxHeads = 4;
constexpr int kMaxStages = 4;
// A lone head has a thread block for itself, pairs of heads have one or two warpgroups in it.
template <int kPair>
constexpr int kMaxThreads = 128 * (kMaxHeads / 2) / (3 - kPair) + 32 * kProducerWarps;
template <int kPair>
constexpr int kResident = kPair == 1 ? 3 : 1;
constexpr int kStepKeys = 16;  // of a range, in a tile
constexpr float kInfinity = INFINITY;
// Below every score, and finite: differences from it are defined.
constexpr float kNoMaximum = -1e30F;
// Exponentials up to this power of 2 may be summed before the maximum they are relative to is renewed.
constexpr float kRenewThreshold = 60.0F;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

struct Control {
  std::uint64_t full[kMaxStages];
  std::uint64_t empty[kMaxStages];
  float log_sums[kMaxHeads][kLastRows];  // base 2
  float maxima[kMaxHeads][kRanges][kLastRows];
  float2 partials[kMaxHeads][kRanges][kLastRows];  // of the warps
};

struct Arguments {
  Problem problem;
  LastQPlan plan;
  LastQSums sums;
  const std::uint8_t* wanted = nullptr;
  int first_unit = 0;
  bool aligned = false;
};

// What every thread of a block knows about its work.
struct Task {
  Geometry geometry;
  int b = 0;
  int kv_head = 0;
  int first_in_group = 0;  // the block's head 0 among those of the KV head
  int first_key = 0;       // of range 0
  int steps = 0;
  std::uint32_t active = 0;  // bit: the block's head is to be estimated
};

__device__ Task task_of_block(const Arguments& a) {
  const Problem& problem = a.problem;
  Task task;
  const int unit = a.first_unit + static_cast<int>(blockIdx.y) / a.plan.head_groups;
  task.b = unit / problem.kv_heads;
  task.kv_head = unit % problem.kv_heads;
  task.geometry = sequence_geometry(problem, task.b);
  task.first_in_group = static_cast<int>(blockIdx.y) % a.plan.head_groups * a.plan.heads;
  task.first_key = static_cast<int>(blockIdx.x) * kRanges * a.plan.range;
  const int keys = min(max(task.geometry.kv_len - task.first_key, 0), a.plan.range);
  task.steps = (keys + kStepKeys - 1) / kStepKeys;
  const std::uint8_t* wanted = a.wanted + task.b * problem.q_heads + task.kv_head * problem.group;
  for (int g = 0; g < a.plan.heads; ++g) {
    const int head = task.first_in_group + g;
    if (head < problem.group && wanted[head] != 0) task.active |= 1U << g;
  }
  return task;
}

template <int kPanels, int kPair>
__device__ void load_queries(const Arguments& a, const Task& task, std::uint32_t queries) {
  const int chunk = static_cast<int>(threadIdx.x) % kChunkDims;
  for (int i = static_cast<int>(threadIdx.x) / kChunkDims; i < a.plan.heads * kLastRows;
       i += static_cast<int>(blockDim.x) / kChunkDims) {
    const int head = i / kLastRows;
    const int row = task.geometry.q_len - kLastRows + i % kLastRows;
    const bool exists = row >= 0 && (task.active >> head & 1) != 0;
    const char* from = query_row(
        a.problem, task.b, exists ? task.kv_head * a.problem.group + task.first_in_group + head : 0,
        exists ? row : 0);
    load_row_chunks<kPanels, kPair>(queries + head / kPair * kPair * kPanels * kPanelBytes,
                                    i % (kPair * kLastRows), chunk, from, exists, a.problem.dim,
                                    a.aligned);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_for_products();
}

// A producer warp's share of the tiles: the keys of two ranges.
template <int kPanels>
class KeyLoader {
 public:
  __device__ KeyLoader(const Arguments& a, const Task& task)
      : a_(a), task_(task), chunk_(lane() % kChunkDims) {
    first_row_ = (static_cast<int>(threadIdx.x) / 32 - a.plan.warpgroups * 4) * kRows;
    first_key_ = task.first_key + first_row_ / kStepKeys * a.plan.range;
    // Rows lie where those of the first step do, a step's keys further on.
    plain_ = a.aligned && a.problem.block_table == nullptr && a.problem.dim == kPanels * kPanelDims;
    if (!plain_) return;
    const std::int64_t row_bytes = a.problem.k.token_stride * 2;
    four_rows_ = 4 * row_bytes;
    step_ = kStepKeys * row_bytes;
    from_ = key_row(a.problem, task.b, task.kv_head, 0) + chunk_ * kChunkDims * 2 +
            (first_key_ + lane() / kChunkDims) * row_bytes;
    range_ = a.plan.range * row_bytes;
  }

  __device__ void load(int step, std::uint32_t tile) {
    const int last_key = first_key_ + a_.plan.range + (step + 1) * kStepKeys - 1;
    if (plain_ && last_key < task_.geometry.kv_len) {
      load_plain(tile);
    } else {
      load_any(step, tile);
    }
    from_ += step_;
  }

 private:
  static constexpr int kRows = kTileTokens / kProducerWarps;

  __device__ void load_plain(std::uint32_t tile) const {
    // Rows 4 apart are swizzled in one of two ways.
    const int row = first_row_ + lane() / kChunkDims;
    const std::uint32_t even = tile + chunk_offset(row, chunk_);
    const std::uint32_t odd = tile + chunk_offset(row + 4, chunk_);
#pragma unroll
    for (int range = 0; range < kRows / kStepKeys; ++range) {
      const char* from = from_ + range * range_;
#pragma unroll
      for (int i = 0; i < kStepKeys / 4; ++i, from += four_rows_) {
        const std::uint32_t to = (i % 2 == 0 ? even : odd) + (range * kStepKeys + i / 2 * 8) * 128;
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          cp_async_16(to + p * kPanelBytes, from + p * kPanelDims * 2, true);
        }
      }
    }
  }

  __device__ void load_any(int step, std::uint32_t tile) const {
#pragma unroll 1
    for (int i = 0; i < kRows; i += 4) {
      const int row = i + lane() / kChunkDims;
      const int key =
          first_key_ + row / kStepKeys * a_.plan.range + step * kStepKeys + row % kStepKeys;
      const bool exists = key < task_.geometry.kv_len;
      load_row_chunks<kPanels>(tile, first_row_ + row, chunk_,
                               key_row(a_.problem, task_.b, task_.kv_head, exists ? key : 0),
                               exists, a_.problem.dim, a_.aligned);
    }
  }

  const Arguments& a_;
  const Task& task_;
  int chunk_;
  int first_row_;
  int first_key_;
  bool plain_;
  const char* from_ = nullptr;  // the lane's chunk of its first row
  std::int64_t four_rows_ = 0;  // bytes
  std::int64_t step_ = 0;
  std::int64_t range_ = 0;
};

// Executed by the producer warps.
template <int kPanels>
__device__ void produce(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t full, std::uint32_t empty) {
  constexpr int kAhead = 2;  // tiles in flight of one thread
  KeyLoader<kPanels> loader(a, task);
  int stage = 0;
  std::uint32_t parity = 1;  // the first round finds every stage empty
  int landed = 0;            // stage of the next tile to announce
  const auto announce = [&] {
    fence_for_products();
    arrive_at(full + landed * 8);
    landed = landed + 1 == a.plan.stages ? 0 : landed + 1;
  };
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(empty + stage * 8, parity);
    loader.load(step, tiles + stage * kPanels * kPanelBytes);
    cp_async_commit();
    if (step >= kAhead) {
      cp_async_wait<kAhead>();
      announce();
    }
    if (++stage == a.plan.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  cp_async_wait<0>();
  for (int step = max(task.steps - kAhead, 0); step < task.steps; ++step) announce();
}

// Turns products into scores in units of log2(e), keys that a query does not see into -infinity.
class Scorer {
 public:
  __device__ Scorer(const Arguments& a, const Task& task)
      : problem_(a.problem), geometry_(task.geometry), b_(task.b) {
    factor_ = problem_.soft_cap > 0 ? kLog2E : problem_.scale * kLog2E;
  }

  __device__ float factor() const { return factor_; }

  // Of 16 keys from first_key on.
  __device__ void apply(int first_key, float (&scores)[kScores]) const {
    if (problem_.soft_cap > 0) {
      const float to_cap = problem_.scale / problem_.soft_cap;
#pragma unroll
      for (float& score : scores) score = problem_.soft_cap * tanhf(score * to_cap);
    }
    if (sees_all(first_key)) return;
    // The loop that is not unrolled keeps what it needs out of the registers of the products.
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int n = 0; n < kScores; ++n) {
      const int key = first_key + n / 2 % 2 * 8 + lane() / 4;
      const int slot = n / 4 * 8 + lane() % 4 * 2 + n % 2;
      if (sees(slot, key)) seen |= 1U << n;
    }
    const float hidden = factor_ < 0 ? kInfinity : -kInfinity;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if ((seen >> n & 1) == 0) scores[n] = hidden;
    }
  }

 private:
  // Whether every one of the last rows sees the 16 keys.
  __device__ bool sees_all(int first_key) const {
    if (problem_.mask != nullptr) return false;
    const int first_position = geometry_.kv_len - kLastRows;
    const int end = geometry_.causal ? first_position + 1 : geometry_.kv_len;
    return first_key + kStepKeys <= end &&
           (geometry_.window == 0 || first_key > geometry_.kv_len - 1 - geometry_.window);
  }

  __device__ bool sees(int slot, int key) const {
    const int row = geometry_.q_len - kLastRows + slot;
    if (row < 0 || key < geometry_.first_key(row) || key >= geometry_.end_key(row)) return false;
    if (problem_.mask == nullptr) return true;
    const std::uint64_t* bits =
        problem_.mask + b_ * problem_.mask_sequence_stride + row * problem_.mask_row_stride;
    return (bits[key / 64] >> (key % 64) & 1) != 0;
  }

  const Problem& problem_;
  const Geometry& geometry_;
  int b_;
  float factor_;
};

// Maximum and sum of exponentials, of scores in units of log2(e).
__device__ float2 merged(float2 a, float2 b) {
  const float maximum = fmaxf(a.x, b.x);
  return {maximum, a.y * exp2_fast(a.x - maximum) + b.y * exp2_fast(b.x - maximum)};
}

// Running sums of exponentials of a warp's 64 queries; a lane holds those of its own keys. What the
// exponentials are relative to lies in shared memory, as it rarely changes: registers are short.
class SoftmaxSums {
 public:
  // `maxima` [64]: of this warp alone.
  __device__ SoftmaxSums(float* maxima, bool exists) : maxima_(maxima + lane() % 4 * 2) {
    if (exists && lane() < 4) {
      for (int j = 0; j < kPairs; ++j) maxima_[8 * j] = maxima_[8 * j + 1] = kNoMaximum;
    }
    __syncwarp();
  }

  __device__ void add(const float (&scores)[kScores], float factor) {
    float highest = -kInfinity;
    for_each(scores, factor, [&](float score, int) { highest = fmaxf(highest, score); });
    if (__any_sync(~0U, highest > kRenewThreshold)) renew(scores, factor);
    for_each(scores, factor, [&](float score, int q) { sums_[q] += exp2_fast(score); });
  }

  // Maximum and sum of every query, to `to` [64].
  __device__ void store(float2* to) const {
#pragma unroll
    for (int q = 0; q < 2 * kPairs; ++q) {
      float sum = sums_[q];
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(~0U, sum, distance);
      }
      const int at = q / 2 * 8 + q % 2;
      if (lane() < 4) to[at + lane() * 2] = {maxima_[at], sum};
    }
  }

 private:
  static constexpr int kPairs = 8;

  // Calls visit(score relative to its query's maximum, query of the lane).
  template <class Visit>
  __device__ void for_each(const float (&scores)[kScores], float factor, Visit&& visit) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 maxima = *reinterpret_cast<const float2*>(maxima_ + 8 * j);
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; ++n) {
        visit(fmaf(scores[n], factor, n % 2 == 0 ? -maxima.x : -maxima.y), 2 * j + n % 2);
      }
    }
  }

  __device__ void renew(const float (&scores)[kScores], float factor) {
#pragma unroll
    for (int q = 0; q < 2 * kPairs; ++q) {
      const int n = q / 2 * 4 + q % 2;
      const int at = q / 2 * 8 + q % 2;
      const float before = maxima_[at];
      float maximum = fmaxf(fmaxf(scores[n] * factor, scores[n + 2] * factor), before);
      for (int distance = 4; distance < 32; distance *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(~0U, maximum, distance));
      }
      sums_[q] *= exp2_fast(before - maximum);
      __syncwarp();
      if (lane() < 4) maxima_[at] = maximum;
    }
    __syncwarp();
  }

  float* maxima_;
  float sums_[2 * kPairs] = {};
};

// Column and diagonal sums of the probabilities of one range of keys.
//
// Key base + 8 * i + g of lane (g, t) and query slot 8 * j + 2 * t + e lie on the diagonal
// u = key - slot + 63 = base + 8 * (i - j + 7) + (7 + g - 2 * t - e). A lane keeps one sum for each
// i - j + 7 and e. Sixteen keys further the sums have moved by two places: the first two are done.
class SlashSums {
 public:
  // Base-2 logarithms of the softmax's denominators, by slot, in shared memory.
  __device__ explicit SlashSums(const float* log_sums)
      : log_sums_(log_sums + threadIdx.x % 4 * 2) {}

  // Takes the scores of the 16 keys from `base` on. The results of key and of diagonal
  // base + g + 8 * t are in lanes t < 2.
  __device__ void add(const float (&scores)[kScores], float factor, float& column,
                      float& diagonal) {
    float columns[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 log_sums = *reinterpret_cast<const float2*>(log_sums_ + 8 * j);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = n / 2;
        const int e = n % 2;
        const float p =
            exp2_fast(fmaf(scores[4 * j + n], factor, e == 0 ? -log_sums.x : -log_sums.y));
        columns[i] += p;
        sums_[e][i - j + 7] += p;
      }
    }
    column = sum_of_quads(columns[0], columns[1]);
    diagonal = advance();
  }

  // The diagonals of the next 16 places.
  __device__ float advance() {
    const int t = lane() % 4;
    float octets[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Lanes at place 7 + g - 2 * t - e >= 8 are one octet ahead.
      const bool ahead = 7 + lane() / 4 - 2 * t - e >= 8;
      const float first = ahead ? before_[e] : sums_[e][0];
      const float second = ahead ? sums_[e][0] : sums_[e][1];
      const int from = (lane() / 4 + 1 + 2 * t + e) % 8 * 4 + t;
      octets[0] += __shfl_sync(~0U, first, from);
      octets[1] += __shfl_sync(~0U, second, from);
      before_[e] = sums_[e][1];
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) sums_[e][k] = k + 2 < kPlaces ? sums_[e][k + 2] : 0.0F;
    }
    return sum_of_quads(octets[0], octets[1]);
  }

 private:
  static constexpr int kPlaces = 9;

  // Sums over the four lanes of a quad: of `even` in lanes 0 and 2, of `odd` in lanes 1 and 3.
  __device__ static float sum_of_quads(float even, float odd) {
    const bool is_odd = (threadIdx.x & 1) != 0;
    float sum = is_odd ? odd : even;
    sum += __shfl_xor_sync(~0U, is_odd ? even : odd, 1);
    return sum + __shfl_xor_sync(~0U, sum, 2);
  }

  const float* log_sums_;
  float sums_[2][kPlaces] = {};
  float before_[2] = {};  // the second place, 16 keys ago
};

// Executed by a whole warpgroup: combines the partial sums of all chunks.
__device__ void combine_partials(const Arguments& a, const Task& task, const float2* partials,
                                 float* log_sums) {
  const int slot = static_cast<int>(threadIdx.x) % 128;
  if (slot < kLastRows) {
    float2 total{kNoMaximum, 0.0F};
    constexpr int kAtATime = 8;  // loads in flight
    for (int first = 0; first < a.plan.chunks; first += kAtATime) {
      float2 some[kAtATime];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        some[i] = {kNoMaximum, 0.0F};
        if (first + i < a.plan.chunks) some[i] = partials[(first + i) * kLastRows + slot];
      }
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) total = merged(total, some[i]);
    }
    // Slots without a row count nowhere, and a row that sees nothing has only scores of -infinity.
    const bool exists = task.geometry.q_len - kLastRows + slot >= 0;
    const float log_sum = total.y == 0.0F ? 0.0F : total.x + log2f(total.y);
    log_sums[slot] = exists ? log_sum : kInfinity;
  }
}

// What a warp does with the scores of one head and its range of keys: the first kernel.
class StatsOfHead {
 public:
  static constexpr bool kNeedsKeys = false;  // blocks without keys say so

  // Row `head` of the sums, head `local` of the block; all but end() by a whole warpgroup.
  __device__ StatsOfHead(const Arguments& a, const Task&, Control& control, std::int64_t head,
                         int local, bool exists)
      : sums_(control.maxima[local][static_cast<int>(threadIdx.x) % 128 / 32], exists),
        of_warps_(control.partials[local]),
        to_(a.sums.partials + (head * a.plan.chunks + blockIdx.x) * kLastRows) {}

  __device__ void add(const float (&scores)[kScores], float factor, int) {
    sums_.add(scores, factor);
  }

  __device__ void end() {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    sums_.store(of_warps_[thread / 32]);
    named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);
    if (thread < kLastRows) {
      to_[thread] = merged(merged(of_warps_[0][thread], of_warps_[1][thread]),
                           merged(of_warps_[2][thread], of_warps_[3][thread]));
    }
  }

 private:
  SoftmaxSums sums_;
  float2 (&of_warps_)[kRanges][kLastRows];
  float2* to_;
};

// The second kernel.
class SumsOfHead {
 public:
  static constexpr bool kNeedsKeys = true;

  __device__ SumsOfHead(const Arguments& a, const Task& task, Control& control, std::int64_t head,
                        int local, bool exists)
      : sums_(control.log_sums[local]), kv_len_(task.geometry.kv_len) {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    if (exists) {
      combine_partials(a, task, a.sums.partials + head * a.plan.chunks * kLastRows,
                       control.log_sums[local]);
    }
    columns_ = a.sums.columns + head * a.plan.stride + place();
    diagonals_ = a.sums.diagonals + head * a.plan.stride + place();
    tails_ = a.sums.tails + ((head * a.plan.chunks + blockIdx.x) * kRanges + warp) * kLastRows;
  }

  __device__ void add(const float (&scores)[kScores], float factor, int first_key) {
    float column;
    float diagonal;
    sums_.add(scores, factor, column, diagonal);
    if (writes() && first_key + place() < kv_len_) {
      columns_[first_key] = column;
      diagonals_[first_key] = diagonal;
    }
  }

  __device__ void end() {
    for (int n = 0; n < kLastRows; n += kStepKeys) {
      const float diagonal = sums_.advance();
      if (writes()) tails_[n + place()] = diagonal;
    }
  }

 private:
  // Of the lane's results among the 16 of a step.
  __device__ static int place() { return lane() / 4 + lane() % 4 * 8; }
  __device__ static bool writes() { return lane() % 4 < 2; }

  SlashSums sums_;
  int kv_len_;
  float* columns_;
  float* diagonals_;
  float* tails_;
};

// Executed by a warpgroup for the block's heads local ... local + kPair - 1.
template <class T, int kPanels, int kPair, class OfHead>
__device__ void consume(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t queries, std::uint32_t full, std::uint32_t empty,
                        Control& control, int local) {
  const std::int64_t head =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.y) / a.plan.head_groups) *
          a.problem.group +
      task.first_in_group + local;
  const bool has_first = (task.active >> local & 1) != 0;
  const bool has_second = kPair == 2 && (task.active >> (local + 1) & 1) != 0;
  OfHead first(a, task, control, head, local, has_first);
  OfHead second(a, task, control, head + 1, (local + 1) % kMaxHeads, has_second);
  named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);

  const Scorer scorer(a, task);
  const int range_begin = task.first_key + static_cast<int>(threadIdx.x) % 128 / 32 * a.plan.range;
  int stage = 0;
  std::uint32_t parity = 0;
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(full + stage * 8, parity);
    float products[kPair * kScores];
    multiply_tiles<T, kPanels, kPair>(tiles + stage * kPanels * kPanelBytes, queries, products);
    if (lane() == 0) arrive_at(empty + stage * 8);
    if (++stage == a.plan.stages) {
      stage = 0;
      parity ^= 1;
    }
    const int first_key = range_begin + step * kStepKeys;
    const auto add = [&](OfHead& to, int tile) {
      float scores[kScores];
#pragma unroll
      for (int n = 0; n < kScores; ++n) scores[n] = products[tile * kScores + n];
      scorer.apply(first_key, scores);
      to.add(scores, scorer.factor(), first_key);
    };
    if (has_first) add(first, 0);
    if constexpr (kPair == 2) {
      if (has_second) add(second, 1);
    }
  }
  if (has_first) first.end();
  if (has_second) second.end();
}

template <class T, int kPanels, int kPair, class OfHead>
__global__ void __launch_bounds__(kMaxThreads<kPair>, kResident<kPair>)
    last_q_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  __shared__ Control control;
  const Task task = task_of_block(a);
  if (task.active == 0 || (OfHead::kNeedsKeys && task.steps == 0)) return;
  // The swizzle counts from multiples of 1,024 bytes.
  const std::uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023U;
  constexpr int kQueryBytes = kPair * kPanels * kPanelBytes;  // of a warpgroup
  const std::uint32_t tiles = queries + a.plan.warpgroups * kQueryBytes;
  const std::uint32_t full = shared_address(control.full);
  const std::uint32_t empty = shared_address(control.empty);
  const auto has_work = [&](int warpgroup) {
    return (task.active >> (warpgroup * kPair) & ((1U << kPair) - 1)) != 0;
  };
  if (threadIdx.x == 0) {
    int consumers = 0;
    for (int w = 0; w < a.plan.warpgroups; ++w) consumers += has_work(w) ? 1 : 0;
    for (int s = 0; s < a.plan.stages; ++s) {
      mbarrier_init(full + s * 8, 32 * kProducerWarps);
      mbarrier_init(empty + s * 8, 4 * consumers);
    }
  }
  load_queries<kPanels, kPair>(a, task, queries);
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  if (warpgroup == a.plan.warpgroups) {
    produce<kPanels>(a, task, tiles, full, empty);
  } else if (has_work(warpgroup)) {
    consume<T, kPanels, kPair, OfHead>(a, task, tiles, queries + warpgroup * kQueryBytes, full,
                                       empty, control, warpgroup * kPair);
  }
}

template <class T, int kPanels, int kPair>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  const int threads = 128 * arguments.plan.warpgroups + 32 * kProducerWarps;
  const int bytes = arguments.plan.shared_bytes;
  const auto start = [&](auto* kernel) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    kernel<<<grid, threads, bytes, stream>>>(arguments);
    check(cudaGetLastError(), "starting the last-q estimate");
  };
  start(last_q_kernel<T, kPanels, kPair, StatsOfHead>);
  start(last_q_kernel<T, kPanels, kPair, SumsOfHead>);
}

template <class T, int kPanels>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  if (arguments.plan.pair == 1) {
    launch<T, kPanels, 1>(arguments, grid, stream);
  } else {
    launch<T, kPanels, 2>(arguments, grid, stream);
  }
}

template <class T>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  switch (arguments.plan.panels) {
    case 1:
      return launch<T, 1>(arguments, grid, stream);
    case 2:
      return launch<T, 2>(arguments, grid, stream);
    default:
      return launch<T, 4>(arguments, grid, stream);
  }
}

}  // namespace

LastQPlan plan_last_q(const Problem& problem) {
  // Sums of more heads than fit in so many bytes are made one after the other.
  constexpr std::int64_t kSumBytes = std::int64_t{48} << 20;
  LastQPlan plan;
  while (plan.panels * kPanelDims < problem.dim) plan.panels *= 2;
  const int limit =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(sizeof(Control));
  const auto bytes = [&] {
    return 1024 + (plan.warpgroups * plan.pair + plan.stages) * plan.panels * kPanelBytes;
  };
  plan.pair = problem.group == 1 ? 1 : 2;
  plan.warpgroups = problem.group > 2 ? kMaxHeads / 2 : 1;
  plan.stages = kMaxStages;
  while (plan.stages > 3 && bytes() > limit) --plan.stages;
  while (plan.warpgroups > 1 && bytes() > limit) --plan.warpgroups;
  while (plan.stages > 2 && bytes() > limit) --plan.stages;
  plan.heads = plan.warpgroups * plan.pair;
  plan.head_groups = (problem.group + plan.heads - 1) / plan.heads;
  plan.shared_bytes = bytes();

  const std::int64_t kv_tokens = std::max(problem.kv_tokens, 1);
  plan.stride = (kv_tokens + 63) / 64 * 64;
  const std::int64_t units = static_cast<std::int64_t>(problem.batch) * problem.kv_heads;
  const std::int64_t unit_bytes = plan.stride * problem.group * 2 * sizeof(float);
  constexpr std::int64_t kMaxGrid = 65535;
  plan.units = static_cast<int>(std::clamp<std::int64_t>(
      kSumBytes / unit_bytes, 1, std::min(units, kMaxGrid / problem.group)));

  // So many chunks that the multiprocessors finish together.
  const int resident =
      std::clamp(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                     (plan.shared_bytes + static_cast<int>(sizeof(Control)) + 1024),
                 1, plan.warpgroups == 2 ? 1 : 2);
  const std::int64_t slots = static_cast<std::int64_t>(resident) * multiprocessors();
  const std::int64_t blocks = static_cast<std::int64_t>(plan.units) * plan.head_groups;
  constexpr std::int64_t kBlockSteps = 12;  // what a thread block costs beside its keys, in steps
  const std::int64_t steps = (kv_tokens + kStepKeys - 1) / kStepKeys;
  std::int64_t best = INT64_MAX;
  const std::int64_t most = std::min<std::int64_t>((steps + kRanges - 1) / kRanges, 256);
  for (std::int64_t chunks = 1; chunks <= most; ++chunks) {
    const std::int64_t range = (steps + chunks * kRanges - 1) / (chunks * kRanges);
    const std::int64_t waves = (blocks * chunks + slots - 1) / slots;
    const std::int64_t cost = waves * (range + kBlockSteps);
    // Diagonals reach into one other range only.
    if (cost >= best || range * kStepKeys < kLastRows) continue;
    best = cost;
    plan.range = static_cast<int>(range) * kStepKeys;
  }
  if (best == INT64_MAX) plan.range = kLastRows;
  plan.chunks = static_cast<int>((kv_tokens + plan.range * kRanges - 1) / (plan.range * kRanges));
  return plan;
}

LastQSums allocate(const Problem& problem, const LastQPlan& plan, MemoryPieces& workspace) {
  const std::int64_t heads = static_cast<std::int64_t>(plan.units) * problem.group;
  LastQSums sums;
  sums.partials = workspace.take<float2>(heads * plan.chunks * kLastRows);
  sums.columns = workspace.take<float>(heads * plan.stride);
  sums.diagonals = workspace.take<float>(heads * plan.stride);
  sums.tails = workspace.take<float>(heads * plan.chunks * kRanges * kLastRows);
  return sums;
}

void estimate_last_q(const Problem& problem, const LastQPlan& plan, const std::uint8_t* wanted,
                     int first, int count, const LastQSums& sums, cudaStream_t stream) {
  Arguments arguments{problem, plan,  sums,
                      wanted,  first, is_aligned(problem.q) && is_aligned(problem.k)};
  const dim3 grid(plan.chunks, count * plan.head_groups);
  if (problem.q.dtype == DType::kBF16) {
    launch<__nv_bfloat16>(arguments, grid, stream);
  } else {
    launch<__half>(arguments, grid, stream);
  }
}

}  // namespace minference::cuda

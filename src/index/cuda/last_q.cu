// Two producer warps fetch tiles of keys; a warpgroup a query head multiplies them with its queries
// and sums up. A tile holds 16 keys from each of four distant ranges: every warp walks a range of its
// own, so that its diagonal sums stay in registers until no later key can add to them.
#include "index/cuda/last_q.h"

#include <climits>
#include <cmath>

#include "attention/cuda/check.h"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

constexpr int kRanges = LastQPlan::kRanges;
constexpr int kProducerWarps = 2;
constexpr int kMaxHeads = LastQPlan::kMaxHeads;
constexpr int kMaxThreads = 128 * kMaxHeads + 32 * kProducerWarps;
constexpr int kStages = LastQPlan::kStages;
constexpr int kStepKeys = 16;  // of a range, in a tile
constexpr float kInfinity = INFINITY;
// Below every score, and finite: differences from it are defined.
constexpr float kNoMaximum = -1e30F;
// Exponentials up to this power of 2 may be summed before the maximum they are relative to is renewed.
constexpr float kRenewThreshold = 60.0F;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % 32; }

struct Control {
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
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

static_assert(sizeof(Control) + sizeof(Task) <= LastQPlan::kFixedBytes);

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

template <int kPanels>
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
    load_row_chunks<kPanels>(queries + head * kPanels * kPanelBytes, i % kLastRows, chunk, from,
                             exists, a.problem.dim, a.aligned);
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
    first_row_ = (static_cast<int>(threadIdx.x) / 32 - a.plan.heads * 4) * kRows;
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
    landed = landed + 1 == kStages ? 0 : landed + 1;
  };
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(empty + stage * 8, parity);
    loader.load(step, tiles + stage * kPanels * kPanelBytes);
    cp_async_commit();
    if (step >= kAhead) {
      cp_async_wait<kAhead>();
      announce();
    }
    if (++stage == kStages) {
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
      // cap * tanh(x) with tanh(x) = 1 - 2 / (1 + e^2x).
      const float exponent = 2 * kLog2E * problem_.scale / problem_.soft_cap;
#pragma unroll
      for (float& score : scores) {
        const float tail = __fdividef(2.0F, 1.0F + exp2_fast(score * exponent));
        score = problem_.soft_cap - problem_.soft_cap * tail;
      }
    }
    if (sees_all(first_key)) return;
    const float hidden = factor_ < 0 ? kInfinity : -kInfinity;
    // Of the lane's first key and query; the others lie constants further on. The queries' positions
    // ascend, and slots without a row count nowhere.
    const int key = first_key + lane() / 4;
    const int behind = geometry_.kv_len - kLastRows + lane() % 4 * 2 - key;
    const int keys_left = geometry_.kv_len - key;
    const int window = geometry_.window == 0 ? INT_MAX : geometry_.window;
    const int ahead = geometry_.causal ? 0 : -INT_MAX / 2;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const int further = n / 2 % 2 * 8;
      const int distance = behind + n / 4 * 8 + n % 2 - further;
      if (distance < ahead || distance >= window || further >= keys_left) scores[n] = hidden;
    }
    if (problem_.mask != nullptr) hide_masked(first_key, hidden, scores);
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

  __device__ void hide_masked(int first_key, float hidden, float (&scores)[kScores]) const {
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int n = 0; n < kScores; ++n) {
      const int key = first_key + n / 2 % 2 * 8 + lane() / 4;
      const int row = geometry_.q_len - kLastRows + n / 4 * 8 + lane() % 4 * 2 + n % 2;
      if (row < 0 || key >= geometry_.kv_len) continue;
      const std::uint64_t* bits =
          problem_.mask + b_ * problem_.mask_sequence_stride + row * problem_.mask_row_stride;
      seen |= static_cast<std::uint32_t>(bits[key / 64] >> (key % 64) & 1) << n;
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if ((seen >> n & 1) == 0) scores[n] = hidden;
    }
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
  __device__ explicit SoftmaxSums(float* maxima) : maxima_(maxima + lane() % 4 * 2) {
    if (lane() < 4) {
      for (int j = 0; j < kPairs; ++j) maxima_[8 * j] = maxima_[8 * j + 1] = kNoMaximum;
    }
    __syncwarp();
  }

  __device__ void add(const float (&scores)[kScores], float factor) {
    float highest[2] = {-kInfinity, -kInfinity};  // two chains of dependent instructions, not one
    for_each(scores, factor,
             [&](float score, int q) { highest[q % 2] = fmaxf(highest[q % 2], score); });
    if (__any_sync(~0U, fmaxf(highest[0], highest[1]) > kRenewThreshold)) renew(scores, factor);
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
                         int local)
      : sums_(control.maxima[local][static_cast<int>(threadIdx.x) % 128 / 32]),
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
                        int local)
      : sums_(control.log_sums[local]), kv_len_(task.geometry.kv_len) {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    combine_partials(a, task, a.sums.partials + head * a.plan.chunks * kLastRows,
                     control.log_sums[local]);
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

// Executed by a warpgroup for the block's head `local`.
template <class T, int kPanels, class OfHead>
__device__ void consume(const Arguments& a, const Task& task, std::uint32_t tiles,
                        std::uint32_t queries, std::uint32_t full, std::uint32_t empty,
                        Control& control, int local) {
  const std::int64_t head =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.y) / a.plan.head_groups) *
          a.problem.group +
      task.first_in_group + local;
  OfHead sums(a, task, control, head, local);
  named_barrier(1 + local, 128);
  const Scorer scorer(a, task);
  const int range_begin = task.first_key + static_cast<int>(threadIdx.x) % 128 / 32 * a.plan.range;
  int stage = 0;
  std::uint32_t parity = 0;
  for (int step = 0; step < task.steps; ++step) {
    wait_for_phase(full + stage * 8, parity);
    float scores[kScores];
    start_products<T, kPanels>(tiles + stage * kPanels * kPanelBytes, queries, scores);
    finish_products(scores);
    if (lane() == 0) arrive_at(empty + stage * 8);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    const int first_key = range_begin + step * kStepKeys;
    scorer.apply(first_key, scores);
    sums.add(scores, scorer.factor(), first_key);
  }
  sums.end();
}

template <class T, int kPanels, class OfHead>
__global__ void __launch_bounds__(kMaxThreads, 1)
    last_q_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char shared_memory[];
  __shared__ Control control;
  // Not in registers, which are short.
  __shared__ Task task;
  if (threadIdx.x == 0) task = task_of_block(a);
  __syncthreads();
  if (task.active == 0 || (OfHead::kNeedsKeys && task.steps == 0)) return;
  // The swizzle counts from multiples of 1,024 bytes.
  const std::uint32_t queries = (shared_address(shared_memory) + 1023) & ~1023U;
  constexpr int kTileBytes = kPanels * kPanelBytes;
  const std::uint32_t tiles = queries + a.plan.heads * kTileBytes;
  const std::uint32_t full = shared_address(control.full);
  const std::uint32_t empty = shared_address(control.empty);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + s * 8, 32 * kProducerWarps);
      mbarrier_init(empty + s * 8, 4 * __popc(task.active));
    }
  }
  load_queries<kPanels>(a, task, queries);
  __syncthreads();
  const int local = static_cast<int>(threadIdx.x) / 128;
  if (local == a.plan.heads) {
    produce<kPanels>(a, task, tiles, full, empty);
  } else if ((task.active >> local & 1) != 0) {
    consume<T, kPanels, OfHead>(a, task, tiles, queries + local * kTileBytes, full, empty, control,
                                local);
  }
}

template <class T, int kPanels>
void launch(const Arguments& arguments, dim3 grid, cudaStream_t stream) {
  const int bytes = arguments.plan.shared_bytes;
  const int threads = 128 * arguments.plan.heads + 32 * kProducerWarps;
  const auto start = [&](auto* kernel) {
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
    kernel<<<grid, threads, bytes, stream>>>(arguments);
    check(cudaGetLastError(), "starting the last-q estimate");
  };
  start(last_q_kernel<T, kPanels, StatsOfHead>);
  start(last_q_kernel<T, kPanels, SumsOfHead>);
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

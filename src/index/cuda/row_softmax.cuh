// Scores of a row pass, and the softmax of its rows.
#pragma once

#include <climits>
#include <cstdint>

#include "index/cuda/row_pass_task.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::row_pass {

// Below every score, and finite: differences from it are defined.
inline constexpr float kNoMaximum = -1e30F;
// Exponentials up to this power of 2 may be summed before the maximum they are relative to is renewed.
inline constexpr float kRenewThreshold = 60.0F;

// The last rows of a chunk.
struct LastRows {
  struct Shared {};
  static constexpr bool kSpreadRanges = false;  // of keys, see Task::range_step

  // Keys are counted from this many before the first one.
  __device__ static int keys_before(const Geometry&) { return 0; }
  // The row of a slot; negative: there is none.
  __device__ static int row(const Arguments&, const Geometry& geometry, int slot) {
    return geometry.q_len - kPassRows + slot;
  }
  // Executed by the whole block; what it leaves in shared memory is seen after the next barrier.
  __device__ static void prepare(const Arguments&, const Geometry&, Shared&) {}
  // Of eight slots each, the first octet whose rows may see keys from first_key on; not below `octet`,
  // which was that of earlier keys.
  __device__ static int first_octet(const Shared&, int, int) { return 0; }

  // Which of 16 keys from first_key on the lane's rows do not see: hide(n) for score n, of those from
  // an octet on.
  template <class Hide>
  __device__ static void for_each_hidden(const Geometry& geometry, const Shared&, int first_key,
                                         int, Hide&& hide) {
    // Of the lane's first key and query; the others lie constants further on. The queries' positions
    // ascend, and slots without a row count nowhere.
    const int key = first_key + lane() / 4;
    const int behind = geometry.kv_len - kPassRows + lane() % 4 * 2 - key;
    const int keys_left = geometry.kv_len - key;
    const int window = geometry.window == 0 ? INT_MAX : geometry.window;
    const int ahead = geometry.causal ? 0 : -INT_MAX / 2;
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const int further = n / 2 % 2 * 8;
      const int distance = behind + n / 4 * 8 + n % 2 - further;
      if (distance < ahead || distance >= window || further >= keys_left) hide(n);
    }
  }
  // Whether every row sees the 16 keys.
  __device__ static bool all_see(const Geometry& geometry, const Shared&, int first_key) {
    const int first_position = geometry.kv_len - kPassRows;
    const int end = geometry.causal ? first_position + 1 : geometry.kv_len;
    return first_key + kStepKeys <= end &&
           (geometry.window == 0 || first_key > geometry.kv_len - 1 - geometry.window);
  }
};

// Turns products into scores in units of log2(e), keys that a query does not see into -infinity.
template <class Rows>
class Scorer {
 public:
  __device__ Scorer(const Arguments& a, const Task& task, const typename Rows::Shared& rows)
      : a_(a), geometry_(task.geometry), rows_(rows), b_(task.b) {
    factor_ = a.problem.soft_cap > 0 ? kLog2E : a.problem.scale * kLog2E;
  }

  __device__ float factor() const { return factor_; }

  // Of 16 keys from first_key on; of the octets before `octet` there are no scores.
  __device__ void apply(int first_key, int octet, float (&scores)[kScores]) const {
    const Problem& problem = a_.problem;
    if (problem.soft_cap > 0) {
      // cap * tanh(x) with tanh(x) = 1 - 2 / (1 + e^2x).
      const float exponent = 2 * kLog2E * problem.scale / problem.soft_cap;
#pragma unroll
      for (float& score : scores) {
        const float tail = __fdividef(2.0F, 1.0F + exp2_fast(score * exponent));
        score = problem.soft_cap - problem.soft_cap * tail;
      }
    }
    if (problem.mask == nullptr && Rows::all_see(geometry_, rows_, first_key)) return;
    const float hidden = factor_ < 0 ? kInfinity : -kInfinity;
    Rows::for_each_hidden(geometry_, rows_, first_key, octet, [&](int n) { scores[n] = hidden; });
    if (problem.mask != nullptr) hide_masked(first_key, hidden, scores);
  }

 private:
  __device__ void hide_masked(int first_key, float hidden, float (&scores)[kScores]) const {
    const Problem& problem = a_.problem;
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int n = 0; n < kScores; ++n) {
      const int key = first_key + n / 2 % 2 * 8 + lane() / 4;
      const int row = Rows::row(a_, geometry_, n / 4 * 8 + lane() % 4 * 2 + n % 2);
      if (row < 0 || key >= geometry_.kv_len) continue;
      const std::uint64_t* bits =
          problem.mask + b_ * problem.mask_sequence_stride + row * problem.mask_row_stride;
      seen |= static_cast<std::uint32_t>(bits[key / 64] >> (key % 64) & 1) << n;
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if ((seen >> n & 1) == 0) scores[n] = hidden;
    }
  }

  const Arguments& a_;
  const Geometry& geometry_;
  const typename Rows::Shared& rows_;
  int b_;
  float factor_;
};

// Maximum and sum of exponentials, of scores in units of log2(e).
__device__ inline float2 merged(float2 a, float2 b) {
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

  __device__ void add(const float (&scores)[kScores], float factor, int octet) {
    float highest[2] = {-kInfinity, -kInfinity};  // two chains of dependent instructions, not one
    for_each(scores, factor, octet,
             [&](float score, int q) { highest[q % 2] = fmaxf(highest[q % 2], score); });
    if (__any_sync(~0U, fmaxf(highest[0], highest[1]) > kRenewThreshold))
      renew(scores, factor, octet);
    for_each(scores, factor, octet, [&](float score, int q) { sums_[q] += exp2_fast(score); });
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
  __device__ void for_each(const float (&scores)[kScores], float factor, int octet,
                           Visit&& visit) const {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (j < octet) continue;
      const float2 maxima = *reinterpret_cast<const float2*>(maxima_ + 8 * j);
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; ++n) {
        visit(fmaf(scores[n], factor, n % 2 == 0 ? -maxima.x : -maxima.y), 2 * j + n % 2);
      }
    }
  }

  __device__ void renew(const float (&scores)[kScores], float factor, int octet) {
#pragma unroll
    for (int q = 0; q < 2 * kPairs; ++q) {
      if (q / 2 < octet) continue;
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

// Executed by a whole warpgroup: combines the partial sums of all chunks.
template <class Rows>
__device__ void combine_partials(const Arguments& a, const Task& task, const float2* partials,
                                 float* log_sums) {
  const int slot = static_cast<int>(threadIdx.x) % 128;
  if (slot < kPassRows) {
    float2 total{kNoMaximum, 0.0F};
    constexpr int kAtATime = 8;  // loads in flight
    for (int first = 0; first < a.plan.chunks; first += kAtATime) {
      float2 some[kAtATime];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        some[i] = {kNoMaximum, 0.0F};
        if (first + i < a.plan.chunks) some[i] = partials[(first + i) * kPassRows + slot];
      }
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) total = merged(total, some[i]);
    }
    // Slots without a row count nowhere, and a row that sees nothing has only scores of -infinity.
    const bool exists = Rows::row(a, task.geometry, slot) >= 0;
    const float log_sum = total.y == 0.0F ? 0.0F : total.x + log2f(total.y);
    log_sums[slot] = exists ? log_sum : kInfinity;
  }
}

}  // namespace minference::cuda::row_pass

// Scores of the last-q estimate, and what is summed of them.
#pragma once

#include <climits>
#include <cstdint>

#include "index/cuda/last_q_task.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda::last_q {

// Below every score, and finite: differences from it are defined.
inline constexpr float kNoMaximum = -1e30F;
// Exponentials up to this power of 2 may be summed before the maximum they are relative to is renewed.
inline constexpr float kRenewThreshold = 60.0F;

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
__device__ inline void combine_partials(const Arguments& a, const Task& task,
                                        const float2* partials, float* log_sums) {
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

}  // namespace minference::cuda::last_q

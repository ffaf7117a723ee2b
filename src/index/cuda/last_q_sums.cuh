// Column and diagonal sums of the last-q estimate.
#pragma once

#include "index/cuda/row_softmax.cuh"

namespace minference::cuda::last_q {

using row_pass::lane;

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

  // Of the 16 results of a step, which one the lane has, and whether it is the one that writes it.
  __device__ static int place() { return lane() / 4 + lane() % 4 * 8; }
  __device__ static bool writes() { return lane() % 4 < 2; }

  // Takes the scores of the 16 keys from `base` on. The results of key and of diagonal
  // base + g + 8 * t are in lanes t < 2.
  __device__ void add(const float (&scores)[kScores], float factor, float& column,
                      float& diagonal) {
    add(
        scores, factor, [](int) { return true; }, column, diagonal);
  }

  // The same of those keys 8 * i + g alone for which the lane's counts(i) is true.
  template <class Counts>
  __device__ void add(const float (&scores)[kScores], float factor, Counts&& counts, float& column,
                      float& diagonal) {
    float columns[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 log_sums = *reinterpret_cast<const float2*>(log_sums_ + 8 * j);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = n / 2;
        const int e = n % 2;
        const float exponent = fmaf(scores[4 * j + n], factor, e == 0 ? -log_sums.x : -log_sums.y);
        const float p = counts(i) ? exp2_fast(exponent) : 0.0F;
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

}  // namespace minference::cuda::last_q

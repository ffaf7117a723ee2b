// The fewest of many weights that hold a share of their sum: index/top_k.h's smallest_cover() on the
// device. Weights are whole numbers, so that sums do not depend on the order.
#pragma once

#include <cstdint>

#include "index/cuda/warp_sums.cuh"

namespace minference::cuda {

// What a whole is in weights.
inline constexpr double kWholeWeight = 2147483648.0;  // 2^31

// Weights above `weight` are taken, and the first `ties` of those equal to it.
struct Cover {
  std::uint32_t weight = ~0U;
  int ties = 0;
};

// Executed by a warp: calls visit(weight) for entries begin ... end - 1, each by one lane.
template <class Weight, class Visit>
__device__ void for_each_weight(Weight&& weight, int begin, int end, Visit&& visit) {
  constexpr int kAtATime = 8;  // loads in flight
  for (int first = begin + static_cast<int>(threadIdx.x) % 32; first < end;
       first += 32 * kAtATime) {
    std::uint32_t some[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      some[i] = first + 32 * i < end ? weight(first + 32 * i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) visit(some[i]);
  }
}

// The weights that a warp chooses from, or a thread block with a class of its own: sum() is over those who
// choose. Entries that do not take part have no weight.
template <class Weight>
class WeightsInMemory {
 public:
  __device__ WeightsInMemory(const Weight& weight, int begin, int end)
      : weight_(weight), begin_(begin), end_(end) {}

  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    for_each_weight(weight_, begin_, end_, visit);
  }
  __device__ std::uint32_t sum(std::uint32_t of_lane) const { return warp_sum(of_lane); }

 private:
  const Weight& weight_;
  int begin_;
  int end_;
};

// Executed by those who choose: the highest weight such that what is at or above it measures `wanted`, at least 1
// and at most the measure of all. `above`: what is above it. measure(w): of an entry of weight w > 0.
template <class Weights, class Measure>
__device__ std::uint32_t find_cut(const Weights& weights, std::uint32_t wanted, Measure&& measure,
                                  std::uint32_t& above) {
  std::uint32_t cut = 0;
  above = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t candidate = cut | 1U << bit;
    std::uint32_t held = 0;
    weights.for_each([&](std::uint32_t w) { held += w >= candidate ? measure(w) : 0; });
    held = weights.sum(held);
    if (held >= wanted) {
      cut = candidate;
    } else {
      above = held;  // the last that fails is the next above the result
    }
  }
  return cut;
}

// Executed by those who choose: the heaviest entries that hold `wanted` together, which is at most their sum.
template <class Weights>
__device__ Cover find_cover(const Weights& weights, std::uint32_t wanted) {
  Cover cover;
  if (wanted == 0) return cover;
  std::uint32_t above;
  cover.weight = find_cut(
      weights, wanted, [](std::uint32_t w) { return w; }, above);
  cover.ties = static_cast<int>((wanted - above + cover.weight - 1) / cover.weight);
  return cover;
}

// Executed by a warp: the `count` heaviest of `size` entries.
template <class Weights>
__device__ Cover find_heaviest(const Weights& weights, int size, int count) {
  count = min(count, size);
  Cover cover;
  if (count <= 0) return cover;
  // Entries without weight are the last resort, and count in full.
  std::uint32_t above;
  cover.weight = find_cut(
      weights, count, [](std::uint32_t) { return 1U; }, above);
  cover.ties = count - static_cast<int>(above);
  return cover;
}

}  // namespace minference::cuda

#include "index/cuda/coverings.h"

#include <cmath>

#include "attention/cuda/check.h"
#include "index/coverage_rule.h"
#include "index/cuda/density.cuh"

namespace minference::cuda {
namespace {

constexpr int kThreads = kDensitySteps;
constexpr float kTile = kTileRows;

struct Arguments {
  Problem problem;
  CoveragePlan plan;
  const std::uint8_t* wanted = nullptr;
  CoverageTables masses;
  CoveringRule rule;
  CoveringTables tables;
};

// Sums by step of density, and from each step on. In two halves: 64-bit additions to shared memory are
// slow where many threads add to one place.
struct Sums {
  std::uint32_t low[kDensitySteps];
  std::uint32_t high[kDensitySteps];

  __device__ void clear() { low[threadIdx.x] = high[threadIdx.x] = 0; }

  __device__ void add(int step, std::uint32_t value) {
    if (value == 0) return;
    const bool carries = atomicAdd(&low[step], value) + value < value;
    if (carries) atomicAdd(&high[step], 1U);
  }

  // Of this thread's step and all above. Executed by a block.
  __device__ unsigned long long from_here() {
    const int i = static_cast<int>(threadIdx.x);
    unsigned long long sum = at(i);
    for (int distance = 1; distance < kDensitySteps; distance *= 2) {
      const unsigned long long other = i + distance < kDensitySteps ? at(i + distance) : 0;
      __syncthreads();
      sum += other;
      low[i] = static_cast<std::uint32_t>(sum);
      high[i] = static_cast<std::uint32_t>(sum >> 32);
      __syncthreads();
    }
    return sum;
  }

 private:
  __device__ unsigned long long at(int i) const {
    return static_cast<unsigned long long>(high[i]) << 32 | low[i];
  }
};

// What all offers of one class of columns share.
struct OfClass {
  unsigned long long total = 0;  // mass of the head
  unsigned long long columns = 0;
  float column_boxes = 0;  // of all tiles
  std::uint32_t column_count = 0;
};

struct Shared {
  Sums mass;    // of one half of the rows, by the steps that the other half gives
  Sums rows;    // that have the distances
  Sums joined;  // rows of distances that continue a run
  bool exists[kDensitySteps];
  OfClass of_class;
};

__device__ void sum_classes(const Arguments& a, std::int64_t head, int distances, int least_class,
                            float tiles, OfClass& result) {
  if (threadIdx.x == 0) result = {};
  __syncthreads();
  unsigned long long total = 0;
  unsigned long long columns = 0;
  const std::uint32_t* masses =
      a.masses.by_distance + head * kHalves * kMassClasses * a.plan.distances;
  for (int i = 0; i < kHalves * kMassClasses; ++i, masses += a.plan.distances) {
    const int c = i % kMassClasses;
    unsigned long long of_class = 0;
    for (int d = static_cast<int>(threadIdx.x); d < distances; d += kThreads) of_class += masses[d];
    total += of_class;
    if (c >= least_class) columns += of_class;
  }
  atomicAdd(&result.total, total);
  atomicAdd(&result.columns, columns);
  if (threadIdx.x == 0) {
    unsigned long long rows = 0;
    for (int c = least_class; c < kMassClasses; ++c) {
      rows += a.masses.rows_of_class[head * kMassClasses + c];
      result.column_count += a.masses.keys_of_class[head * kMassClasses + c];
    }
    // The last box of a tile is half full in the mean.
    result.column_boxes = static_cast<float>(rows) / (kTile * kBoxKeys) + 0.5F * tiles;
  }
  __syncthreads();
}

// Blocks (head, class that columns begin with, less 1); a thread an offer.
__global__ void __launch_bounds__(kThreads) offer(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  const std::int64_t head = blockIdx.x;
  if (a.wanted[head] == 0) return;
  const int least_class = static_cast<int>(blockIdx.y) + 1;
  const Geometry geometry =
      sequence_geometry(a.problem, static_cast<int>(head / a.problem.q_heads));
  const float tiles = ceilf(static_cast<float>(geometry.q_len) / kTile);
  const Densities densities(geometry,
                            a.masses.by_distance + head * kHalves * kMassClasses * a.plan.distances,
                            a.plan.distances, least_class);
  const int me = static_cast<int>(threadIdx.x);
  shared.mass.clear();
  shared.rows.clear();
  shared.joined.clear();
  shared.exists[me] = false;
  sum_classes(a, head, densities.count(), least_class, tiles, shared.of_class);
  const OfClass& of_class = shared.of_class;
  if (of_class.column_count > a.rule.column_room) return;
  for (int distance = me; distance < densities.count(); distance += kThreads) {
    const std::uint32_t masses[kHalves] = {densities.mass(0, distance),
                                           densities.mass(1, distance)};
    const int step = densities.step(distance, masses[0] + masses[1]);
    const auto rows = static_cast<std::uint32_t>(densities.rows(distance));
    for (int half = 0; half < kHalves; ++half) {
      shared.mass.add(densities.step(distance, kHalves * masses[1 - half]), masses[half]);
    }
    shared.rows.add(step, rows);
    shared.joined.add(min(step, densities.step(distance - 1)), rows);
    shared.exists[step] = true;
  }
  __syncthreads();
  const unsigned long long mass = shared.mass.from_here();
  const unsigned long long all_rows = shared.rows.from_here();
  const unsigned long long joined = shared.joined.from_here();
  if (me == 0 || !shared.exists[me]) return;  // as the next step, or what holds nothing too
  const double kept = static_cast<double>(of_class.columns + mass);
  const float loss =
      of_class.total == 0
          ? 0.0F
          : static_cast<float>(fmax(1 - kept / static_cast<double>(of_class.total), 0.0));
  const float run_rows = static_cast<float>(all_rows - joined);
  // The two row blocks of a tile share a run's boxes but for the first and the last.
  const float boxes = (static_cast<float>(all_rows) + run_rows) / kTile;
  const BoxCosts& costs = a.rule.costs;
  const float cost = boxes + costs.run * run_rows / kTile + costs.column * of_class.column_boxes +
                     costs.tile * tiles;
  const int offer = (least_class - 1) * kDensitySteps + me;
  a.tables.losses[head * kOffers + offer] = loss;
  const int level =
      loss <= 0 ? kLossLevels - 1 : min(static_cast<int>(-8 * log2f(loss)), kLossLevels - 1);
  // Costs are positive: as integers they order alike.
  atomicMin(
      a.tables.best + head * kLossLevels + max(level, 0),
      static_cast<unsigned long long>(__float_as_uint(cost)) << 32 | static_cast<unsigned>(offer));
}

// Boxes of exact attention in all tiles of a head. Executed by a block.
__device__ float dense_boxes(const Geometry& geometry) {
  __shared__ unsigned long long boxes;
  if (threadIdx.x == 0) boxes = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int row = static_cast<int>(threadIdx.x) * kTileRows; row < geometry.q_len;
       row += static_cast<int>(blockDim.x) * kTileRows) {
    const int end = geometry.end_key(min(row + kTileRows, geometry.q_len) - 1);
    mine += (end + kBoxKeys - 1) / kBoxKeys - geometry.first_key(row) / kBoxKeys;
  }
  atomicAdd(&boxes, mine);
  __syncthreads();
  return static_cast<float>(boxes);
}

constexpr int kChoiceThreads = 1024;
constexpr int kChoiceWarps = kChoiceThreads / 32;

// A warp a head at a time: the level with the least of cost + weight * loss^kLossPower, or
// kLossLevels for dense attention; in every lane.
struct Pick {
  int level = kLossLevels;
  float loss = 0;
};
constexpr int kOfLane = kLossLevels / 32;
using Offers = float2[kOfLane];  // of a lane: levels lane, lane + 32, ...

__device__ void read_offers(const float2* levels, Offers& offers) {
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) offers[i] = levels[threadIdx.x % 32 + i * 32];
}

__device__ Pick pick(const Offers& offers, float dense, float weight) {
  float least = dense;
  Pick best;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float sum = offers[i].x + weight * offers[i].y * offers[i].y * offers[i].y;
    if (sum < least) {
      least = sum;
      best = {static_cast<int>(threadIdx.x) % 32 + i * 32, offers[i].y};
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(~0U, least, distance);
    const int level = __shfl_xor_sync(~0U, best.level, distance);
    const float loss = __shfl_xor_sync(~0U, best.loss, distance);
    if (other < least || (other == least && level < best.level)) {
      least = other;
      best = {level, loss};
    }
  }
  return best;
}

// A block a sequence: the weight of losses at which its heads lose no more than allowed in the mean.
__global__ void __launch_bounds__(kChoiceThreads) choose(const __grid_constant__ Arguments a) {
  static_assert(kLossPower == 3);
  __shared__ float losses[kChoiceWarps];
  const int b = static_cast<int>(blockIdx.x);
  const int heads = a.problem.q_heads;
  const std::int64_t first = static_cast<std::int64_t>(b) * heads;
  const int thread = static_cast<int>(threadIdx.x);
  if (a.wanted[first] == 0) {  // then no head of the sequence is
    for (int h = thread; h < heads; h += kChoiceThreads) a.tables.chosen[first + h] = kDenseOffer;
    return;
  }
  for (std::int64_t i = thread; i < static_cast<std::int64_t>(heads) * kLossLevels;
       i += kChoiceThreads) {
    const unsigned long long best = a.tables.best[first * kLossLevels + i];
    float2 level{INFINITY, 0.0F};
    if (best != ~0ULL) {
      const std::int64_t head = first + i / kLossLevels;
      level.x = __uint_as_float(static_cast<unsigned>(best >> 32));
      level.y = a.tables.losses[head * kOffers + static_cast<unsigned>(best)];
    }
    a.tables.levels[first * kLossLevels + i] = level;
  }
  const Geometry geometry = sequence_geometry(a.problem, b);
  const CoverageRule& rule = a.rule.rule;
  const auto dense = static_cast<float>(rule.max_cost) * a.rule.costs.dense * dense_boxes(geometry);
  const auto allowed =
      static_cast<float>(allowed_loss(rule, geometry.kv_len)) * static_cast<float>(heads);
  __syncthreads();

  // Costs lie between 1 and 2^31; 2^-16 is the least loss that counts.
  float low = -16;  // base-2 logarithms
  float high = 31 + 3 * 16 + 1;
  // Of its first head a warp keeps the offers.
  const float2* levels = a.tables.levels + (first + thread / 32) * kLossLevels;
  Offers own;
  if (thread / 32 < heads) read_offers(levels, own);
  const auto pick_of = [&](int h, float weight) {
    if (h < kChoiceWarps) return pick(own, dense, weight);
    Offers offers;
    read_offers(levels + std::int64_t{h - h % kChoiceWarps} * kLossLevels, offers);
    return pick(offers, dense, weight);
  };
  for (int i = 0; i < 24; ++i) {
    const float weight = exp2f((low + high) / 2);
    float lost = 0;
    for (int h = thread / 32; h < heads; h += kChoiceWarps) lost += pick_of(h, weight).loss;
    __syncthreads();
    if (thread % 32 == 0) losses[thread / 32] = lost;
    __syncthreads();
    lost = 0;
    for (const float loss : losses) lost += loss;
    (lost <= allowed ? high : low) = (low + high) / 2;
  }
  for (int h = thread / 32; h < heads; h += kChoiceWarps) {
    const Pick best = pick_of(h, exp2f(high));
    if (thread % 32 != 0) continue;
    a.tables.chosen[first + h] =
        best.level == kLossLevels
            ? kDenseOffer
            : static_cast<std::int32_t>(a.tables.best[(first + h) * kLossLevels + best.level]);
  }
}

}  // namespace

CoveringTables allocate_coverings(const Problem& problem, MemoryPieces& workspace) {
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  CoveringTables tables;
  tables.losses = workspace.take<float>(heads * kOffers);
  tables.best = workspace.take<unsigned long long>(heads * kLossLevels);
  tables.levels = workspace.take<float2>(heads * kLossLevels);
  tables.chosen = workspace.take<std::int32_t>(heads);
  return tables;
}

void choose_coverings(const Problem& problem, const CoveragePlan& plan, const std::uint8_t* wanted,
                      const CoverageTables& masses, const CoveringRule& rule,
                      const CoveringTables& tables, cudaStream_t stream) {
  const Arguments arguments{problem, plan, wanted, masses, rule, tables};
  const auto heads = static_cast<unsigned>(problem.batch) * static_cast<unsigned>(problem.q_heads);
  check(
      cudaMemsetAsync(tables.best, 0xFF,
                      static_cast<std::size_t>(heads) * kLossLevels * sizeof(*tables.best), stream),
      "clearing offers");
  offer<<<dim3(heads, kMassClasses - 1), kThreads, 0, stream>>>(arguments);
  choose<<<problem.batch, kChoiceThreads, 0, stream>>>(arguments);
  check(cudaGetLastError(), "choosing coverings");
}

}  // namespace minference::cuda

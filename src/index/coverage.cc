#include "index/coverage.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

std::int64_t floor_granule(std::int64_t position) {
  return position >= 0 ? position / kRunGranule : -((kRunGranule - 1 - position) / kRunGranule);
}

// Of a multiple of 4 values.
double sum_of(const float* values, std::int64_t n) {
  double lanes[4] = {};  // independent sums
  for (std::int64_t i = 0; i < n; i += 4) {
    for (std::int64_t lane = 0; lane < 4; ++lane) lanes[lane] += values[i + lane];
  }
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

int class_of(float mass, float mean) {
  // Where the sinks took all mass, nothing is left to compare with.
  if (mass <= 0 || !(mass >= 2 * mean)) return 0;
  return std::min(std::ilogb(mass / mean), MassTable::kClasses - 1);
}

// One head on its way through the keys.
class HeadEstimate {
 public:
  // `lanes` is memory for what finish() sums up.
  HeadEstimate(const KernelTable& kernels, const SequenceGeometry& geometry,
               std::span<const std::int64_t> rows, MassTable& table, std::vector<float>& lanes)
      : kernels_(kernels),
        rows_(static_cast<std::int64_t>(rows.size())),
        table_(table),
        lanes_(lanes) {
    const std::int64_t first = geometry.position(0);
    table.q_len = geometry.q_len;
    table.kv_len = geometry.kv_len;
    table.total = 0;
    table.columns.clear();
    table.width = first % kRunGranule == 0 ? kRowBlock / kRunGranule : kRowBlock / kRunGranule + 1;
    table.distances = geometry.kv_len / kRunGranule + table.width;
    table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
    mean_ = static_cast<float>(rows_) / static_cast<float>(geometry.kv_len);
    // Zeros of a batch's keys behind a row lie at distances before the first one.
    before_ = (geometry.q_len + kBatchKeys) / kRunGranule + 1;
    lanes.assign((before_ + table.distances) * kMaxLanes, 0.0F);
    for (std::int64_t r = 0; r < rows_; ++r) {
      block_granule_[r] = floor_granule(first + rows[r] / kRowBlock * kRowBlock);
      if (r == 0 || block_granule_[r] != block_granule_[r - 1]) ++blocks_;
      block_end_[blocks_ - 1] = r + 1;
    }
  }

  // Adds a batch of probabilities, n_keys a row, which it overwrites.
  void add_batch(std::int64_t begin, std::int64_t n_keys, float* probabilities) {
    if (begin == 0) take_sinks(probabilities + kMaxLanes);
    float columns[kBatchKeys] = {};
    kernels_.add_columns(probabilities, rows_, n_keys, columns);
    const std::int64_t end = std::min(n_keys, table_.kv_len - begin);
    table_.total += sum_of(columns, n_keys);
    for (std::int64_t c = 0; c < end; ++c) {
      const int weight_class =
          begin + c < kRunGranule ? MassTable::kClasses - 1 : class_of(columns[c], mean_);
      if (weight_class == 0) continue;
      table_.columns.push_back({begin + c, columns[c], weight_class});
      take_column(weight_class, begin + c, probabilities + kMaxLanes + c);
    }
    float* lanes[kTileRows];
    for (std::int64_t r = 0; r < rows_; ++r) {
      lanes[r] = lanes_.data() + (before_ + entry(r, begin)) * kMaxLanes;
    }
    kernels_.add_granules(probabilities, rows_, n_keys, lanes);
  }

  // To be called behind the last batch.
  void finish() {
    const float* lanes = lanes_.data() + before_ * kMaxLanes;
    for (std::int64_t i = 0; i < table_.distances; ++i, lanes += kMaxLanes) {
      table_.by_distance[i] = std::accumulate(lanes, lanes + kMaxLanes, 0.0F);
    }
  }

 private:
  // The sinks' mass counts nowhere. What they leave is the mass of all other keys, whose mean the
  // classes need before the last key is seen.
  void take_sinks(float* probabilities) {
    double left = static_cast<double>(rows_);
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < std::min(MassTable::kSinks, table_.kv_len); ++c) {
        left -= std::exchange(probabilities[r * kProbabilityStride + c], 0.0F);
      }
    }
    mean_ = static_cast<float>(std::max(left, 0.0) / static_cast<double>(table_.kv_len));
  }

  // Moves a key's mass, one probability a row, from class 0 to its own.
  void take_column(int weight_class, std::int64_t key, float* probabilities) {
    float* of_class = table_.by_distance.data() + weight_class * table_.distances;
    std::int64_t r = 0;
    // Rows of a block have one entry; none for keys behind the block, where they have no mass.
    for (std::int64_t i = 0; i < blocks_; ++i) {
      const std::int64_t at = entry(r, key);
      float sum = at >= 0 ? of_class[at] : 0.0F;
      for (; r < block_end_[i]; ++r) {
        sum += std::exchange(probabilities[r * kProbabilityStride], 0.0F);
      }
      if (at >= 0) of_class[at] = sum;
    }
  }

  // Where a row's mass on the granule of a key belongs, by distance; below 0 for keys behind the row's
  // block.
  std::int64_t entry(std::int64_t r, std::int64_t key) const {
    return block_granule_[r] - key / kRunGranule + table_.width - 1;
  }

  const KernelTable& kernels_;
  std::int64_t rows_;
  MassTable& table_;
  // [before_ + distances][kMaxLanes], partial sums of class 0 by distance
  std::vector<float>& lanes_;
  std::int64_t before_ = 0;
  float mean_ = 0;                              // mass of a key, expected
  std::int64_t block_granule_[kTileRows] = {};  // granule of the first row of the row's block
  std::int64_t blocks_ = 0;                     // row blocks of the rows
  std::int64_t block_end_[kTileRows] = {};      // behind the last row of each
};

struct Worker {
  RowProbabilities probabilities;
  MassTable table;
  std::vector<float> lanes;  // of HeadEstimate

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : probabilities(kernels, input, params) {}
};

}  // namespace

std::vector<std::int64_t> spread_rows(std::int64_t q_len, std::int64_t count) {
  count = std::min(count, q_len);
  std::vector<std::int64_t> rows(count);
  for (std::int64_t r = 0; r < count; ++r) rows[r] = q_len * (2 * r + 1) / (2 * count);
  return rows;
}

void estimate_coverage(const AttentionInput& input, const AttentionParams& params,
                       std::int64_t rows, std::span<const std::uint8_t> wanted,
                       const std::function<void(const MassTable&)>& consume) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  PackedKeys packed(kernels, input, params, input.q.tokens());
  packed.for_each_head<Worker>(wanted, [&](std::int64_t b, std::int64_t h, Worker& worker, int) {
    MassTable& table = worker.table;
    table.b = b;
    table.h = h;
    const SequenceGeometry& geometry = packed.geometry()[b];
    const std::vector<std::int64_t> sampled = spread_rows(geometry.q_len, rows);
    HeadEstimate estimate(kernels, geometry, sampled, table, worker.lanes);
    kernels.enter();
    worker.probabilities.visit_rows(packed, b, h, sampled,
                                    [&](std::int64_t begin, std::int64_t n_keys, float* p) {
                                      estimate.add_batch(begin, n_keys, p);
                                    });
    kernels.leave();
    estimate.finish();
    consume(table);
  });
}

}  // namespace minference

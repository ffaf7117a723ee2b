#include "index/coverage.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kLocalGranules = 3;  // before the row block's own, that every head keeps

std::int64_t floor_granule(std::int64_t position) {
  return position >= 0 ? position / kRunGranule : -((kRunGranule - 1 - position) / kRunGranule);
}

int class_of(float mass, float mean) {
  // Where the sinks took all mass, nothing is left to compare with.
  if (mass <= 0 || !(mass >= 2 * mean)) return 0;
  return std::min(std::ilogb(mass / mean), MassTable::kClasses - 1);
}

// One head on its way through the keys.
class HeadEstimate {
 public:
  HeadEstimate(const SequenceGeometry& geometry, std::span<const std::int64_t> rows,
               MassTable& table)
      : rows_(static_cast<std::int64_t>(rows.size())), table_(table) {
    const std::int64_t first = geometry.position(0);
    table.q_len = geometry.q_len;
    table.kv_len = geometry.kv_len;
    table.total = 0;
    table.columns.clear();
    table.width = first % kRunGranule == 0 ? kRowBlock / kRunGranule : kRowBlock / kRunGranule + 1;
    table.distances = geometry.kv_len / kRunGranule + table.width;
    table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
    mean_ = static_cast<float>(rows_) / static_cast<float>(geometry.kv_len);
    for (std::int64_t r = 0; r < rows_; ++r) {
      block_granule_[r] = floor_granule(first + rows[r] / kRowBlock * kRowBlock);
    }
  }

  // Adds a batch of probabilities, n_keys a row, which it overwrites.
  void add_batch(std::int64_t begin, std::int64_t n_keys, float* probabilities) {
    const auto row_of = [=](std::int64_t r) {
      return probabilities + r * kProbabilityStride + kMaxLanes;
    };
    if (begin == 0) take_sinks(row_of(0));
    n_keys = std::min(n_keys, table_.kv_len - begin);
    float columns[kBatchKeys] = {};
    for (std::int64_t r = 0; r < rows_; ++r) {
      const float* row = row_of(r);
      for (std::int64_t c = 0; c < n_keys; ++c) columns[c] += row[c];
    }
    for (std::int64_t c = 0; c < n_keys; ++c) {
      table_.total += columns[c];
      const int weight_class =
          begin + c < kRunGranule ? MassTable::kClasses - 1 : class_of(columns[c], mean_);
      if (weight_class == 0) continue;
      table_.columns.push_back({begin + c, columns[c], weight_class});
      for (std::int64_t r = 0; r < rows_; ++r) {
        float& mass = row_of(r)[c];
        add(weight_class, r, begin + c, std::exchange(mass, 0.0F));
      }
    }
    for (std::int64_t granule = 0; granule < n_keys; granule += kRunGranule) {
      for (std::int64_t r = 0; r < rows_; ++r) {
        const float* row = row_of(r) + granule;
        float lanes[4] = {};
        // Behind the last key of the sequence stand zeros.
        for (std::int64_t c = 0; c < kRunGranule; c += 4) {
          for (std::int64_t lane = 0; lane < 4; ++lane) lanes[lane] += row[c + lane];
        }
        add(0, r, begin + granule, lanes[0] + lanes[1] + lanes[2] + lanes[3]);
      }
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

  void add(int weight_class, std::int64_t r, std::int64_t key, float mass) {
    if (mass == 0.0F) return;
    const std::int64_t distance = block_granule_[r] - key / kRunGranule;
    const std::int64_t i = weight_class * table_.distances + distance + table_.width - 1;
    table_.by_distance[i] += mass;
  }

  std::int64_t rows_;
  MassTable& table_;
  float mean_ = 0;                              // mass of a key, expected
  std::int64_t block_granule_[kTileRows] = {};  // granule of the first row of the row's block
};

// Share of the chunk's rows that lie `position` or behind it.
double share_of_rows(const MassTable& table, std::int64_t position) {
  const std::int64_t first = table.kv_len - table.q_len;
  const auto behind = static_cast<double>(table.kv_len - std::max(position, first));
  return std::max(behind / static_cast<double>(table.q_len), 0.0);
}

// The distances of one covering, as they are chosen.
class Choice {
 public:
  Choice(const MassTable& table, const std::vector<double>& masses, const std::vector<double>& keys)
      : width_(table.width), masses_(masses), keys_(keys), kept_(table.distances, 0) {
    const std::int64_t local = std::min(table.width + kLocalGranules, table.distances);
    for (std::int64_t i = 0; i < local; ++i) take(i);
  }

  // Takes distance i and, where it has too few kept neighbours for a run, the heavier of those beside.
  void add(std::int64_t i) {
    if (kept_[i] != 0) return;
    take(i);
    std::int64_t first = i;
    std::int64_t last = i;
    const auto size = static_cast<std::int64_t>(kept_.size());
    const auto extend = [&] {
      while (first > 0 && kept_[first - 1] != 0) --first;
      while (last + 1 < size && kept_[last + 1] != 0) ++last;
    };
    extend();
    // What reaches the first distance holds the local ones, which are enough.
    while (last - first + 1 < width_) {
      const bool after = last + 1 < size && masses_[last + 1] >= masses_[first - 1];
      take(after ? last + 1 : first - 1);
      extend();
    }
  }

  double mass() const { return mass_; }
  double run_keys() const { return run_keys_; }
  const std::vector<std::uint8_t>& kept() const { return kept_; }

 private:
  void take(std::int64_t i) {
    kept_[i] = 1;
    mass_ += masses_[i];
    run_keys_ += keys_[i];
  }

  std::int64_t width_;
  const std::vector<double>& masses_;  // by distance, of keys that are no columns
  const std::vector<double>& keys_;    // by distance, mean keys per row block
  std::vector<std::uint8_t> kept_;
  double mass_ = 0;
  double run_keys_ = 0;
};

}  // namespace

void estimate_coverage(const AttentionInput& input, const AttentionParams& params,
                       std::int64_t rows, std::span<const std::uint8_t> wanted,
                       const std::function<void(const MassTable&)>& consume) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  PackedKeys packed(kernels, input, params, input.q.tokens());
  struct Worker {
    RowProbabilities probabilities;
    MassTable table;

    Worker(const KernelTable& k, const AttentionInput& i, const AttentionParams& p)
        : probabilities(k, i, p) {}
  };
  packed.for_each_head<Worker>(wanted, [&](std::int64_t b, std::int64_t h, Worker& worker, int) {
    MassTable& table = worker.table;
    table.b = b;
    table.h = h;
    const SequenceGeometry& geometry = packed.geometry()[b];
    const std::int64_t count = std::min(rows, geometry.q_len);
    std::vector<std::int64_t> sampled(count);
    for (std::int64_t r = 0; r < count; ++r) {
      sampled[r] = geometry.q_len * (2 * r + 1) / (2 * count);
    }
    HeadEstimate estimate(geometry, sampled, table);
    kernels.enter();
    worker.probabilities.visit_rows(packed, b, h, sampled,
                                    [&](std::int64_t begin, std::int64_t n_keys, float* p) {
                                      estimate.add_batch(begin, n_keys, p);
                                    });
    kernels.leave();
    consume(table);
  });
}

Covering cover(const MassTable& table, double share, const KeyCosts& costs) {
  std::vector<double> keys(table.distances);
  for (std::int64_t i = 0; i < table.distances; ++i) {
    keys[i] = kRunGranule * share_of_rows(table, (i - table.width + 1) * kRunGranule);
  }
  Covering best;
  double best_cost = INFINITY;
  std::vector<double> left(table.distances, 0.0);  // by distance, of keys that are no columns
  std::vector<std::pair<double, std::int64_t>> ranked;
  for (int c = 0; c < MassTable::kClasses - 1; ++c) {
    // Columns: the classes above c; to the distances: classes 0 to c.
    const float* masses = table.of_class(c);
    for (std::int64_t i = 0; i < table.distances; ++i) left[i] += masses[i];
    double column_mass = 0;
    double column_keys = 0;
    for (const MassTable::Column& column : table.columns) {
      if (column.weight_class <= c) continue;
      column_mass += column.mass;
      column_keys += share_of_rows(table, column.key);
    }
    ranked.clear();
    for (std::int64_t i = 0; i < table.distances; ++i) {
      if (left[i] > 0.0) ranked.emplace_back(-left[i] / std::max(keys[i], 1e-3), i);
    }
    std::sort(ranked.begin(), ranked.end());
    Choice choice(table, left, keys);
    const double needed = share * table.total - column_mass;
    for (const auto& [density, i] : ranked) {
      if (choice.mass() >= needed) break;
      choice.add(i);
    }
    const double cost = costs.run * choice.run_keys() + costs.column * column_keys;
    if (cost >= best_cost) continue;
    best_cost = cost;
    best = {table.total > 0 ? (column_mass + choice.mass()) / table.total : 1.0, choice.run_keys(),
            column_keys, c + 1, choice.kept()};
  }
  return best;
}

HeadIndex Covering::head(const MassTable& table) const {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  for (const MassTable::Column& column : table.columns) {
    if (column.weight_class >= least_class) head.columns.push_back(column.key);
  }
  // An offset of d granules reaches, from the rows of a block, `width` granules: the distances
  // d - width + 1 to d.
  for (std::int64_t i = 0; i < table.distances; ++i) {
    if (kept[i] == 0) continue;
    std::int64_t end = i;
    while (end + 1 < table.distances && kept[end + 1] != 0) ++end;
    const std::int64_t first = i;  // distance i - width + 1, whose run begins at offset i
    const std::int64_t last = end - table.width + 1;
    head.runs.push_back({first * kRunGranule, std::max(first, last) * kRunGranule + 1, 1});
    i = end;
  }
  return head;
}

}  // namespace minference

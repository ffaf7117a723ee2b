#include "index/coverage.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kLocalDistances = 4;  // nearest granules that every head keeps

// The sampled rows of one sequence.
struct Sample {
  std::int64_t rows = 0;
  std::int64_t position[kTileRows] = {};
  std::int64_t first_key[kTileRows] = {};
  std::int64_t end_key[kTileRows] = {};
  std::int64_t row[kTileRows] = {};

  Sample(const SequenceGeometry& geometry, std::int64_t wanted)
      : rows(std::min(wanted, geometry.q_len)) {
    for (std::int64_t i = 0; i < rows; ++i) {
      row[i] = geometry.q_len * (2 * i + 1) / (2 * rows);
      position[i] = geometry.position(row[i]);
      first_key[i] = geometry.first_key(row[i]);
      end_key[i] = geometry.end_key(row[i]);
    }
  }

  // Bit c of words[i]: row i sees key begin + c.
  void mask(std::int64_t begin, std::uint64_t* words) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t from = std::clamp<std::int64_t>(first_key[i] - begin, 0, kTileKeys);
      const std::int64_t to = std::clamp<std::int64_t>(end_key[i] - begin, from, kTileKeys);
      const std::uint64_t below_to = to == 64 ? ~0ULL : (1ULL << to) - 1;
      words[i] = from == 64 ? 0 : below_to & ~((1ULL << from) - 1);
    }
  }
};

int class_of(float mass, float mean) {
  if (!(mass >= 2 * mean)) return 0;
  return std::min(std::ilogb(mass / mean), MassTable::kClasses - 1);
}

// Adds a batch of n_keys probabilities a row, which it overwrites, to the table.
void add_batch(const Sample& sample, std::int64_t begin, std::int64_t n_keys, float* probabilities,
               MassTable& table) {
  const std::int64_t granules = n_keys / kRunGranule;
  const auto row_of = [=](std::int64_t r) {
    return probabilities + r * kProbabilityStride + kMaxLanes;
  };
  float columns[kBatchKeys] = {};
  for (std::int64_t granule = 0; granule < granules; ++granule) {
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      const float* p = row_of(r) + granule * kRunGranule;
      for (std::int64_t c = 0; c < kRunGranule; ++c) columns[granule * kRunGranule + c] += p[c];
    }
  }
  for (std::int64_t key = begin; key < MassTable::kSinks; ++key) table.total -= columns[key];
  const auto mean = static_cast<float>(table.total / static_cast<double>(table.kv_len));
  const auto distance = [&](std::int64_t r, std::int64_t key) {
    return sample.position[r] / kRunGranule - key / kRunGranule;
  };
  for (std::int64_t c = 0; c < std::min(n_keys, table.kv_len - begin); ++c) {
    // The sinks are kept whatever their mass is: nothing of theirs may be left to the distances.
    const int weight_class =
        begin + c < kRunGranule ? MassTable::kClasses - 1 : class_of(columns[c], mean);
    if (weight_class == 0) continue;
    const bool sink = begin + c < MassTable::kSinks;
    table.columns.push_back({begin + c, sink ? 0.0F : columns[c], weight_class});
    float* masses = table.by_distance.data() + weight_class * table.distances;
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      float& p = row_of(r)[c];
      if (p != 0.0F && !sink) masses[distance(r, begin + c)] += p;
      p = 0.0F;
    }
  }
  for (std::int64_t granule = 0; granule < granules; ++granule) {
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      const float* p = row_of(r) + granule * kRunGranule;
      float lanes[4] = {};
      for (std::int64_t c = 0; c < kRunGranule; c += 4) {
        for (std::int64_t lane = 0; lane < 4; ++lane) lanes[lane] += p[c + lane];
      }
      const float sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
      if (sum != 0.0F) table.by_distance[distance(r, begin + granule * kRunGranule)] += sum;
    }
  }
}

void estimate_head(const PackedKeys& packed, std::int64_t b, std::int64_t h, std::int64_t rows,
                   RowProbabilities& probabilities, MassTable& table) {
  const SequenceGeometry& geometry = packed.geometry()[b];
  const Sample sample(geometry, rows);
  table.b = b;
  table.h = h;
  table.q_len = geometry.q_len;
  table.kv_len = geometry.kv_len;
  table.total = 0;
  table.columns.clear();
  table.distances = geometry.kv_len / kRunGranule + 1;
  table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
  bool started = false;
  probabilities.load(b, h, sample.rows, [&](std::int64_t r) { return sample.row[r]; });
  probabilities.visit_batches(
      [&](KeyBatch& keys, auto&& batch) {
        const std::int64_t first = sample.first_key[0] / kBatchKeys * kBatchKeys;
        const std::int64_t end = sample.end_key[sample.rows - 1];
        for (std::int64_t begin = first; begin < end; begin += kBatchKeys) {
          keys.clear();
          for (std::int64_t tile = begin; tile < std::min(begin + kBatchKeys, end);
               tile += kTileKeys) {
            std::uint64_t words[kTileRows];
            sample.mask(tile, words);
            const bool all = std::all_of(words, words + sample.rows,
                                         [](std::uint64_t word) { return word == ~0ULL; });
            keys.add(packed.keys(b, h, tile), packed.granule_bytes(), nullptr, 0, kTileKeys,
                     all ? nullptr : words, sample.rows);
          }
          batch(begin);
        }
      },
      [&](std::int64_t begin, std::int64_t n_keys, float* p) {
        if (!std::exchange(started, true)) {
          table.total = static_cast<double>(probabilities.seeing_rows());
        }
        add_batch(sample, begin, n_keys, p, table);
      });
}

// Share of the chunk's rows whose position is `position` or more.
double share_of_rows(const MassTable& table, std::int64_t position) {
  const std::int64_t first = table.kv_len - table.q_len;
  const auto behind = static_cast<double>(table.kv_len - std::max(position, first));
  return std::max(behind / static_cast<double>(table.q_len), 0.0);
}

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
  std::vector<std::optional<Worker>> workers(resolve_threads(params.threads));
  packed.in_waves(wanted, [&](std::span<const std::int64_t> heads) {
    parallel_for(static_cast<std::int64_t>(heads.size()), params.threads,
                 [&](std::int64_t i, int thread) {
                   if (!workers[thread]) workers[thread].emplace(kernels, input, params);
                   Worker& worker = *workers[thread];
                   kernels.enter();
                   estimate_head(packed, heads[i] / input.q.heads(), heads[i] % input.q.heads(),
                                 rows, worker.probabilities, worker.table);
                   kernels.leave();
                   consume(worker.table);
                 });
  });
}

Covering cover(const MassTable& table, double share, const KeyCosts& costs) {
  // Mean keys per row block that one granule distance costs beside its neighbour.
  std::vector<double> keys(table.distances);
  for (std::int64_t d = 0; d < table.distances; ++d) {
    keys[d] = kRunGranule * share_of_rows(table, d * kRunGranule);
  }
  const std::int64_t local = std::min(kLocalDistances, table.distances);
  Covering best;
  double best_cost = INFINITY;
  std::vector<double> residual(table.distances, 0.0);  // by distance, of keys that are no columns
  std::vector<std::pair<double, std::int64_t>> ranked;
  std::vector<std::uint8_t> kept;
  for (int c = 0; c < MassTable::kClasses - 1; ++c) {
    // Columns: the classes above c; to the distances: classes 0 to c.
    const float* masses = table.of_class(c);
    for (std::int64_t d = 0; d < table.distances; ++d) residual[d] += masses[d];
    double mass = 0;
    double column_keys = 0;
    for (const MassTable::Column& column : table.columns) {
      if (column.weight_class <= c) continue;
      mass += column.mass;
      column_keys += share_of_rows(table, column.key);
    }
    double run_keys = kRunGranule;  // a run reaches one granule further for half of the rows
    for (std::int64_t d = 0; d < local; ++d) {
      mass += residual[d];
      run_keys += keys[d];
    }
    ranked.clear();
    for (std::int64_t d = local; d < table.distances; ++d) {
      if (residual[d] > 0.0) ranked.push_back({-residual[d] / keys[d], d});
    }
    std::sort(ranked.begin(), ranked.end());
    kept.assign(table.distances, 0);
    kept[local - 1] = 1;
    std::size_t taken = 0;
    while (mass < share * table.total && taken < ranked.size()) {
      const std::int64_t d = ranked[taken++].second;
      mass += residual[d];
      kept[d] = 1;
      // A run of its own reaches one granule further; one that closes a gap saves that.
      const bool before = kept[d - 1] != 0;
      const bool after = d + 1 < table.distances && kept[d + 1] != 0;
      run_keys += keys[d] * (before && after ? 0 : before || after ? 1 : 2);
    }
    const double cost = costs.run * run_keys + costs.column * column_keys;
    if (cost >= best_cost) continue;
    best_cost = cost;
    best = {table.total > 0 ? mass / table.total : 1.0, run_keys, column_keys, c + 1, {}};
    for (std::size_t i = 0; i < taken; ++i) best.distances.push_back(ranked[i].second);
  }
  return best;
}

HeadIndex Covering::head(const MassTable& table) const {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  for (const MassTable::Column& column : table.columns) {
    if (column.weight_class >= least_class) head.columns.push_back(column.key);
  }
  // Offset d * kRunGranule of a row lies d granules behind the row's own: one offset covers the
  // distance for every row.
  std::vector<OffsetRun> runs{{0, (kLocalDistances - 1) * kRunGranule + 1, 1}};
  for (const std::int64_t d : distances) {
    runs.push_back({d * kRunGranule, d * kRunGranule + 1, 1});
  }
  // Neighbouring granules leave no key between them.
  head.runs = merge_runs(std::move(runs), kRunGranule - 1);
  return head;
}

}  // namespace minference

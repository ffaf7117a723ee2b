#include "index/coverage.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kLocalDistances = 4;  // nearest granules that every head keeps

// One query head on its way through the keys.
struct HeadPass {
  RowBlockScratch rows;
  float log_sum[kTileRows] = {};
  MassTable table;

  HeadPass(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0) {}
};

// One thread's memory, reused from task to task.
struct Worker {
  AlignedBuffer<std::byte> keys;       // one packed tile
  AlignedBuffer<float> probabilities;  // [kTileRows][kBatchKeys]
  std::vector<std::optional<HeadPass>> heads;

  explicit Worker(const KernelTable& kernels, std::int64_t dim)
      : keys(kTileKeys * dim * kernels.element_size), probabilities(kTileRows * kBatchKeys) {}
};

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

  // Words of a tile: bit c of row i is set when the row sees key begin + c. False: no row sees any.
  bool mask(std::int64_t begin, std::uint64_t* words) const {
    std::uint64_t any = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t from = std::clamp<std::int64_t>(first_key[i] - begin, 0, kTileKeys);
      const std::int64_t to = std::clamp<std::int64_t>(end_key[i] - begin, from, kTileKeys);
      const std::uint64_t below_to = to == 64 ? ~0ULL : (1ULL << to) - 1;
      words[i] = from == 64 ? 0 : below_to & ~((1ULL << from) - 1);
      any |= words[i];
    }
    return any != 0;
  }
};

int class_of(float mass, float mean) {
  if (!(mass >= 2 * mean)) return 0;
  return std::min(std::ilogb(mass / mean), MassTable::kClasses - 1);
}

// Adds one tile of probabilities, which it overwrites, to the table.
void add_tile(const Sample& sample, std::int64_t begin, std::int64_t count, float* probabilities,
              MassTable& table) {
  const std::int64_t granules = round_up(count, kRunGranule) / kRunGranule;  // that were computed
  float columns[kTileKeys] = {};
  for (std::int64_t granule = 0; granule < granules; ++granule) {
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      const float* p = probabilities + r * kBatchKeys + granule * kRunGranule;
      for (std::int64_t c = 0; c < kRunGranule; ++c) columns[granule * kRunGranule + c] += p[c];
    }
  }
  for (std::int64_t key = begin; key < MassTable::kSinks; ++key) table.total -= columns[key];
  const auto mean = static_cast<float>(table.total / static_cast<double>(table.kv_len));
  const auto distance = [&](std::int64_t r, std::int64_t key) {
    return sample.position[r] / kRunGranule - key / kRunGranule;
  };
  for (std::int64_t c = 0; c < count; ++c) {
    // The sinks are kept whatever their mass is: nothing of theirs may be left to the distances.
    const int weight_class =
        begin + c < kRunGranule ? MassTable::kClasses - 1 : class_of(columns[c], mean);
    if (weight_class == 0) continue;
    const bool sink = begin + c < MassTable::kSinks;
    table.columns.push_back({begin + c, sink ? 0.0F : columns[c], weight_class});
    float* masses = table.by_distance.data() + weight_class * table.distances;
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      float& p = probabilities[r * kBatchKeys + c];
      if (p != 0.0F && !sink) masses[distance(r, begin + c)] += p;
      p = 0.0F;
    }
  }
  for (std::int64_t granule = 0; granule < granules; ++granule) {
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      const float* p = probabilities + r * kBatchKeys + granule * kRunGranule;
      float lanes[4] = {};
      for (std::int64_t c = 0; c < kRunGranule; c += 4) {
        for (std::int64_t lane = 0; lane < 4; ++lane) lanes[lane] += p[c + lane];
      }
      const float sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
      if (sum != 0.0F) table.by_distance[distance(r, begin + granule * kRunGranule)] += sum;
    }
  }
}

// Query heads [first, end) of sequence b, which share one KV head.
void estimate_heads(const KernelTable& kernels, const AttentionInput& input,
                    const AttentionParams& params, const SequenceGeometry& geometry,
                    std::int64_t rows, std::int64_t b, std::span<const std::int64_t> heads,
                    Worker& worker, const std::function<void(const MassTable&)>& consume) {
  const Sample sample(geometry, rows);
  const RowSource source(input, input.k, b, heads[0] / (input.q.heads() / input.k.heads()));
  if (worker.heads.size() < heads.size()) worker.heads.resize(heads.size());
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if (!worker.heads[i]) worker.heads[i].emplace(kernels, input, params);
    HeadPass& pass = *worker.heads[i];
    pass.rows.load(b, heads[i], sample.rows, [&](std::int64_t r) { return sample.row[r]; });
    MassTable& table = pass.table;
    table.b = b;
    table.h = heads[i];
    table.q_len = geometry.q_len;
    table.kv_len = geometry.kv_len;
    table.total = 0;
    table.columns.clear();
    table.distances = geometry.kv_len / kRunGranule + 1;
    table.by_distance.assign(MassTable::kClasses * table.distances, 0.0F);
  }
  const std::int64_t dim = worker.heads[0]->rows.block.dim;
  const auto for_each_tile = [&](auto&& visit) {
    std::uint64_t words[kTileRows];
    for (std::int64_t begin = 0; begin < geometry.kv_len; begin += kTileKeys) {
      if (!sample.mask(begin, words)) continue;
      const void* addresses[kTileKeys];
      const std::int64_t count = std::min(kTileKeys, geometry.kv_len - begin);
      source.rows(begin, count, addresses);
      kernels.pack_keys(addresses, input.k.dtype, count, input.k.dim(), dim, worker.keys.data());
      const bool all =
          std::all_of(words, words + sample.rows, [](std::uint64_t word) { return word == ~0ULL; });
      for (std::size_t i = 0; i < heads.size(); ++i) {
        HeadPass& pass = *worker.heads[i];
        pass.rows.load_keys(worker.keys.data(), count, all ? nullptr : words);
        visit(pass, begin, count);
      }
    }
  };
  for_each_tile([&](HeadPass& pass, std::int64_t, std::int64_t) {
    kernels.sum_exponentials(pass.rows.block, pass.rows.keys);
  });
  for (std::size_t i = 0; i < heads.size(); ++i) {
    HeadPass& pass = *worker.heads[i];
    for (std::int64_t r = 0; r < sample.rows; ++r) {
      const float sum = kernels.row_sum(pass.rows.block, r);
      // A row that sees nothing has only masked scores, whose probability must come out as 0.
      pass.log_sum[r] = sum == 0.0F ? 0.0F : pass.rows.block.shift[r] + std::log2(sum);
      pass.table.total += sum == 0.0F ? 0.0 : 1.0;
    }
  }
  for_each_tile([&](HeadPass& pass, std::int64_t begin, std::int64_t count) {
    kernels.probabilities(pass.rows.block, pass.rows.keys, pass.log_sum,
                          worker.probabilities.data());
    add_tile(sample, begin, count, worker.probabilities.data(), pass.table);
  });
  for (std::size_t i = 0; i < heads.size(); ++i) consume(worker.heads[i]->table);
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
  const int threads = resolve_threads(params.threads);
  const std::int64_t group = input.q.heads() / input.k.heads();
  struct Task {
    std::int64_t b;
    std::vector<std::int64_t> heads;
  };
  // As few tasks as keep the threads busy: each packs the keys for itself.
  const std::int64_t kv_heads = input.q.batch() * input.k.heads();
  const std::int64_t parts = std::min<std::int64_t>((threads + kv_heads - 1) / kv_heads, group);
  std::vector<Task> tasks;
  std::vector<SequenceGeometry> geometry;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const SequenceGeometry& sequence = geometry.emplace_back(input, params, b);
    if (sequence.q_len == 0 || sequence.kv_len == 0) continue;
    for (std::int64_t h = 0; h < input.k.heads(); ++h) {
      for (std::int64_t part = 0; part < parts; ++part) {
        Task task{b, {}};
        for (std::int64_t i = group * part / parts; i < group * (part + 1) / parts; ++i) {
          const std::int64_t head = h * group + i;
          if (wanted[b * input.q.heads() + head] != 0) task.heads.push_back(head);
        }
        if (!task.heads.empty()) tasks.push_back(std::move(task));
      }
    }
  }
  const std::int64_t dim = round_up(input.k.dim(), kernels.dim_align);
  std::vector<std::optional<Worker>> workers(threads);
  parallel_for(static_cast<std::int64_t>(tasks.size()), threads, [&](std::int64_t i, int thread) {
    if (!workers[thread]) workers[thread].emplace(kernels, dim);
    kernels.enter();
    estimate_heads(kernels, input, params, geometry[tasks[i].b], rows, tasks[i].b, tasks[i].heads,
                   *workers[thread], consume);
    kernels.leave();
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

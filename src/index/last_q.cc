#include "index/last_q.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// Sums of one sample of rows.
struct Sums {
  std::vector<float> columns;
  std::vector<float> diagonals;  // entry i: offset kv_len - 1 - i
  std::vector<float> apart;      // the same of the keys set apart
};

// One thread's memory, reused from head to head.
struct Worker {
  RowBlockScratch rows;
  VisibleKeys visible;
  AlignedBuffer<std::byte> keys;       // one packed tile
  AlignedBuffer<float> probabilities;  // [kTileRows][kBatchKeys]
  AlignedBuffer<float> part;           // the same, of one class of keys
  std::vector<Sums> samples;
  std::vector<LastQEstimate> estimates;

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0),
        keys(kTileKeys * rows.block.dim * kernels.element_size),
        probabilities(kTileRows * kBatchKeys),
        part(kTileRows * kBatchKeys) {}
};

// Bit c: key `first` + c is set apart.
std::uint64_t apart_bits(std::span<const TokenRange> apart, std::int64_t first) {
  std::uint64_t bits = 0;
  auto range = std::partition_point(apart.begin(), apart.end(),
                                    [=](const TokenRange& r) { return r.end <= first; });
  for (; range != apart.end() && range->begin < first + kTileKeys; ++range) {
    for (std::int64_t key = std::max(range->begin, first);
         key < std::min(range->end, first + kTileKeys); ++key) {
      bits |= std::uint64_t{1} << (key - first);
    }
  }
  return bits;
}

// Adds a tile of probabilities, whose key c of row r lies on the diagonal entry + c - r, to the sums.
void add_tile(const KernelTable& kernels, std::span<const TokenRange> apart,
              const VisibleKeys::Tile& tile, std::int64_t rows, std::int64_t entry, Worker& worker,
              Sums& sums) {
  const float* probabilities = worker.probabilities.data();
  float* columns = sums.columns.data() + tile.begin;
  const std::uint64_t bits = apart_bits(apart, tile.begin);
  const std::uint64_t all =
      tile.count == kTileKeys ? ~std::uint64_t{0} : (std::uint64_t{1} << tile.count) - 1;
  if ((bits & all) == 0 || (bits & all) == all) {
    std::vector<float>& diagonals = (bits & all) == 0 ? sums.diagonals : sums.apart;
    kernels.add_sums(probabilities, rows, tile.count, columns, diagonals.data() + entry);
    return;
  }
  for (const bool is_apart : {false, true}) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < tile.count; ++c) {
        const std::int64_t i = r * kBatchKeys + c;
        worker.part[i] = ((bits >> c & 1) != 0) == is_apart ? probabilities[i] : 0.0F;
      }
    }
    kernels.add_sums(worker.part.data(), rows, tile.count, columns,
                     (is_apart ? sums.apart : sums.diagonals).data() + entry);
  }
}

// Adds the probabilities of rows [first_row, first_row + rows), at most kTileRows, to the sums.
void add_rows(const KernelTable& kernels, const AttentionInput& input,
              const SequenceGeometry& geometry, std::span<const TokenRange> apart, std::int64_t b,
              std::int64_t h, std::int64_t first_row, std::int64_t rows, Worker& worker,
              Sums& sums) {
  RowBlock& block = worker.rows.block;
  worker.rows.load(b, h, rows, [&](std::int64_t i) { return first_row + i; });
  const RowSource source(input, input.k, b, h / (input.q.heads() / input.k.heads()));
  // The rows may straddle two row blocks of an index, which do not matter without an index.
  const auto for_each_tile = [&](auto&& visit) {
    VisibleKeys::Tile tile;
    worker.visible.start(geometry, nullptr, first_row, first_row + rows);
    while (worker.visible.next_keys(tile)) {
      const void* addresses[kTileKeys];
      const std::int64_t count = std::min(tile.count, geometry.kv_len - tile.begin);
      source.rows(tile.begin, count, addresses);
      kernels.pack_keys(addresses, input.k.dtype, count, input.k.dim(), block.dim,
                        worker.keys.data());
      worker.rows.load_keys(worker.keys.data(), count, tile.mask);
      visit(tile);
    }
  };

  for_each_tile(
      [&](const VisibleKeys::Tile&) { kernels.sum_exponentials(block, worker.rows.keys); });
  float log_sum[kTileRows];
  for (std::int64_t r = 0; r < rows; ++r) {
    const float sum = kernels.row_sum(block, r);
    // A row that sees nothing has only masked scores, whose probability must come out as 0.
    log_sum[r] = sum == 0.0F ? 0.0F : block.shift[r] + std::log2(sum);
  }
  // Row r at key c has offset kv_len - q_len + first_row + r - c, that is entry c - r + entry_of_0.
  const std::int64_t entry_of_0 = geometry.q_len - 1 - first_row;
  for_each_tile([&](const VisibleKeys::Tile& tile) {
    kernels.probabilities(block, worker.rows.keys, log_sum, worker.probabilities.data());
    add_tile(kernels, apart, tile, rows, tile.begin + entry_of_0, worker, sums);
  });
}

std::span<const float> first_of(const std::vector<float>& values, std::int64_t count) {
  return {values.data(), static_cast<std::size_t>(count)};
}

void estimate_sample(const KernelTable& kernels, const AttentionInput& input,
                     const SequenceGeometry& geometry, TokenRange sample,
                     std::span<const TokenRange> apart, Worker& worker, Sums& sums,
                     LastQEstimate& estimate) {
  const std::int64_t kv_len = geometry.kv_len;
  const std::int64_t rows = sample.end - sample.begin;
  const std::int64_t entries = kv_len + rows + kTileKeys;
  sums.columns.assign(kv_len + kTileKeys, 0.0F);
  sums.diagonals.assign(entries, 0.0F);
  sums.apart.assign(apart.empty() ? 0 : entries, 0.0F);
  kernels.enter();
  for (std::int64_t row = sample.begin; row < sample.end; row += kTileRows) {
    add_rows(kernels, input, geometry, apart, estimate.b, estimate.h, row,
             std::min(kTileRows, sample.end - row), worker, sums);
  }
  kernels.leave();
  std::reverse(sums.diagonals.begin(), sums.diagonals.begin() + kv_len);
  if (!apart.empty()) std::reverse(sums.apart.begin(), sums.apart.begin() + kv_len);

  estimate.kv_len = kv_len;
  estimate.rows = rows;
  estimate.columns = first_of(sums.columns, kv_len);
  estimate.diagonals = first_of(sums.diagonals, kv_len);
  estimate.apart = first_of(sums.apart, apart.empty() ? 0 : kv_len);
}

}  // namespace

void estimate_last_q(const AttentionInput& input, const AttentionParams& params,
                     std::int64_t last_q, std::span<const std::uint8_t> wanted,
                     const std::function<void(const LastQEstimate&)>& consume) {
  std::vector<EstimatePlan> plans(input.q.batch());
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t q_len = SequenceGeometry(input, params, b).q_len;
    if (q_len > 0) plans[b].samples.push_back({q_len - std::min(last_q, q_len), q_len});
  }
  estimate_samples(input, params, plans, wanted,
                   [&](std::span<const LastQEstimate> estimates) { consume(estimates.front()); });
}

void estimate_samples(const AttentionInput& input, const AttentionParams& params,
                      std::span<const EstimatePlan> plans, std::span<const std::uint8_t> wanted,
                      const std::function<void(std::span<const LastQEstimate>)>& consume) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  std::vector<SequenceGeometry> geometry;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) geometry.emplace_back(input, params, b);
  std::vector<std::optional<Worker>> workers(resolve_threads(params.threads));
  parallel_for(input.q.batch() * input.q.heads(), params.threads, [&](std::int64_t i, int thread) {
    const std::int64_t b = i / input.q.heads();
    const EstimatePlan& plan = plans[b];
    if (wanted[i] == 0 || plan.samples.empty() || geometry[b].kv_len == 0) return;
    if (!workers[thread]) workers[thread].emplace(kernels, input, params);
    Worker& worker = *workers[thread];
    worker.samples.resize(plan.samples.size());
    worker.estimates.resize(plan.samples.size());
    for (std::size_t s = 0; s < plan.samples.size(); ++s) {
      worker.estimates[s].b = b;
      worker.estimates[s].h = i % input.q.heads();
      estimate_sample(kernels, input, geometry[b], plan.samples[s], plan.apart, worker,
                      worker.samples[s], worker.estimates[s]);
    }
    consume(worker.estimates);
  });
}

}  // namespace minference

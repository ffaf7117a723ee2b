#include "index/last_q.h"

#include <algorithm>
#include <vector>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"

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
  RowProbabilities probabilities;
  AlignedBuffer<float> part;  // probabilities of one class of keys
  std::vector<Sums> samples;
  std::vector<LastQEstimate> estimates;

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : probabilities(kernels, input, params), part(kTileRows * kProbabilityStride) {}
};

// For each of n_keys keys from `first` on whether it is set apart; returns how many are.
std::int64_t mark_apart(std::span<const TokenRange> apart, std::int64_t first, std::int64_t n_keys,
                        std::uint8_t* marks) {
  std::fill_n(marks, n_keys, 0);
  std::int64_t count = 0;
  auto range = std::partition_point(apart.begin(), apart.end(),
                                    [=](const TokenRange& r) { return r.end <= first; });
  for (; range != apart.end() && range->begin < first + n_keys; ++range) {
    const std::int64_t begin = std::max(range->begin, first);
    const std::int64_t end = std::min(range->end, first + n_keys);
    std::fill(marks + (begin - first), marks + (end - first), 1);
    count += end - begin;
  }
  return count;
}

// Adds a batch of probabilities, whose key c of row r lies on the diagonal entry + c - r, to the sums.
void add_batch(const KernelTable& kernels, std::span<const TokenRange> apart, std::int64_t begin,
               std::int64_t n_keys, std::int64_t rows, std::int64_t entry,
               const float* probabilities, float* part, Sums& sums) {
  float* columns = sums.columns.data() + begin;
  std::uint8_t marks[kBatchKeys];
  const std::int64_t count = mark_apart(apart, begin, n_keys, marks);
  if (count == 0 || count == n_keys) {
    std::vector<float>& diagonals = count == 0 ? sums.diagonals : sums.apart;
    kernels.add_sums(probabilities, rows, n_keys, columns, diagonals.data() + entry);
    return;
  }
  for (const std::uint8_t wanted : {0, 1}) {
    std::copy_n(probabilities, rows * kProbabilityStride, part);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* row = part + r * kProbabilityStride + kMaxLanes;
      for (std::int64_t c = 0; c < n_keys; ++c) {
        if (marks[c] != wanted) row[c] = 0.0F;
      }
    }
    kernels.add_sums(part, rows, n_keys, columns,
                     (wanted != 0 ? sums.apart : sums.diagonals).data() + entry);
  }
}

std::span<const float> first_of(const std::vector<float>& values, std::int64_t count) {
  return {values.data(), static_cast<std::size_t>(count)};
}

void estimate_sample(const KernelTable& kernels, const PackedKeys& packed, TokenRange sample,
                     std::span<const TokenRange> apart, Worker& worker, Sums& sums,
                     LastQEstimate& estimate) {
  const SequenceGeometry& geometry = packed.geometry()[estimate.b];
  const std::int64_t kv_len = geometry.kv_len;
  const std::int64_t rows = sample.end - sample.begin;
  const std::int64_t entries = kv_len + rows + kTileKeys;
  sums.columns.assign(kv_len + kTileKeys, 0.0F);
  sums.diagonals.assign(entries, 0.0F);
  sums.apart.assign(apart.empty() ? 0 : entries, 0.0F);
  kernels.enter();
  for (std::int64_t row = sample.begin; row < sample.end; row += kTileRows) {
    const std::int64_t count = std::min(kTileRows, sample.end - row);
    // Row r at key c has offset kv_len - q_len + row + r - c, that is entry c - r + entry_of_0.
    const std::int64_t entry_of_0 = geometry.q_len - 1 - row;
    worker.probabilities.visit(
        packed, estimate.b, estimate.h, row, count,
        [&](std::int64_t begin, std::int64_t n_keys, const float* probabilities) {
          add_batch(kernels, apart, begin, n_keys, count, begin + entry_of_0, probabilities,
                    worker.part.data(), sums);
        });
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
  std::vector<std::uint8_t> planned(wanted.begin(), wanted.end());
  std::int64_t last_rows = 0;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t q_len = SequenceGeometry(input, params, b).q_len;
    for (const TokenRange& sample : plans[b].samples) {
      last_rows = std::max(last_rows, q_len - sample.begin);
    }
    if (plans[b].samples.empty()) {
      std::fill_n(planned.begin() + b * input.q.heads(), input.q.heads(), 0);
    }
  }
  PackedKeys packed(kernels, input, params, last_rows);
  packed.for_each_head<Worker>(planned, [&](std::int64_t b, std::int64_t h, Worker& worker, int) {
    const EstimatePlan& plan = plans[b];
    worker.samples.resize(plan.samples.size());
    worker.estimates.resize(plan.samples.size());
    for (std::size_t s = 0; s < plan.samples.size(); ++s) {
      worker.estimates[s].b = b;
      worker.estimates[s].h = h;
      estimate_sample(kernels, packed, plan.samples[s], plan.apart, worker, worker.samples[s],
                      worker.estimates[s]);
    }
    consume(worker.estimates);
  });
}

}  // namespace minference

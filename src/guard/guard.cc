#include "minference/guard.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cuda/library.h"
#include "attention/precision.h"
#include "attention/validate.h"
#include "attention/visible_keys.h"
#include "core/stopwatch.h"
#include "guard/recalls.h"
#include "guard/row_sample.h"
#include "index/packed_keys.h"
#include "minference/error.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// One bit per key for each sampled row of a sequence.
class RowBits {
 public:
  void reset(std::int64_t rows, std::int64_t kv_len) {
    words_ = round_up(kv_len, kBatchKeys) / 64 + 1;
    bits_.assign(rows * words_, 0);
  }

  // Sets the bits of the keys that `row`, the i-th sampled one, sees; head null: all of them.
  void collect(std::int64_t i, const SequenceGeometry& geometry, const HeadIndex* head,
               std::int64_t row, VisibleKeys& keys) {
    keys.mark_row(geometry, head, row, bits_.data() + i * words_);
  }

  // Those of a batch of keys from `key` on.
  const std::uint64_t* batch(std::int64_t i, std::int64_t key) const {
    return bits_.data() + i * words_ + key / 64;
  }

 private:
  std::int64_t words_ = 0;
  std::vector<std::uint64_t> bits_;  // [rows][words]
};

// The sampled rows of one sequence, and what they see.
struct Sample {
  std::int64_t rows = 0;
  std::int64_t q_len = 0;
  RowBits visible;

  std::int64_t row(std::int64_t i) const { return RowSample::row(i, rows, q_len); }
};

struct Worker {
  RowBlockScratch rows;
  VisibleKeys visible;
  RowBits kept;
  std::uint64_t kept_mask[kTileRows][kBatchKeys / 64];
  float sums[kTileRows][2];

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : rows(kernels, input, params, 0) {}
};

// Makes worker.rows.keys the batch from `key` on, as the sampled rows see it. False when none does.
bool load_batch(const PackedKeys& packed, const Sample& sample, std::int64_t b, std::int64_t h,
                std::int64_t key, Worker& worker) {
  const std::int64_t count = std::min(kBatchKeys, packed.geometry()[b].kv_len - key);
  KeyBatch& keys = worker.rows.keys;
  keys.clear();
  bool any = false;
  for (std::int64_t i = 0; i < sample.rows; ++i) {
    for (std::int64_t w = 0; w < kBatchKeys / 64; ++w) {
      const std::uint64_t seen = sample.visible.batch(i, key)[w];
      any = any || seen != 0;
      keys.masked = keys.masked || seen != ~std::uint64_t{0};
      keys.mask[i][w] = seen;
      worker.kept_mask[i][w] = worker.kept.batch(i, key)[w];
    }
  }
  keys.granules = round_up(count, kKeyGranule) / kKeyGranule;
  for (std::int64_t g = 0; g < keys.granules; ++g) {
    keys.keys[g] = packed.keys(b, h, key + g * kKeyGranule);
  }
  return any;
}

double head_recall(const KernelTable& kernels, const PackedKeys& packed, const Sample& sample,
                   const HeadIndex* head, std::int64_t b, std::int64_t h, Worker& worker) {
  static_assert(kMaxGuardRows <= kTileRows);
  const SequenceGeometry& geometry = packed.geometry()[b];
  RowBlock& block = worker.rows.block;
  worker.rows.load(b, h, sample.rows, [&](std::int64_t i) { return sample.row(i); });
  worker.kept.reset(sample.rows, geometry.kv_len);
  for (std::int64_t i = 0; i < sample.rows; ++i) {
    worker.kept.collect(i, geometry, head, sample.row(i), worker.visible);
  }

  // Per row, the kept part of the running sum of exponentials, and the shift that it is relative to.
  double kept[kTileRows] = {};
  float shift[kTileRows] = {};
  kernels.enter();
  const std::int64_t first = geometry.first_key(sample.row(0)) / kBatchKeys * kBatchKeys;
  for (std::int64_t key = first; key < geometry.kv_len; key += kBatchKeys) {
    if (!load_batch(packed, sample, b, h, key, worker)) continue;
    kernels.split_exponentials(block, worker.rows.keys, worker.kept_mask, worker.sums);
    for (std::int64_t i = 0; i < sample.rows; ++i) {
      if (shift[i] != block.shift[i]) {
        if (kept[i] > 0.0) kept[i] *= std::exp2(static_cast<double>(shift[i]) - block.shift[i]);
        shift[i] = block.shift[i];
      }
      kept[i] += worker.sums[i][0];
    }
  }
  kernels.leave();

  double total = 0.0;
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < sample.rows; ++i) {
    const double all = kernels.row_sum(block, i);
    if (all == 0.0) continue;
    // Both are rounded sums, in different orders.
    total += std::min(kept[i] / all, 1.0);
    counted += 1;
  }
  return counted > 0 ? total / static_cast<double>(counted) : 1.0;
}

// Recall of each head on the sampled rows of its sequence.
std::vector<double> sampled_recall(const AttentionInput& input, const AttentionParams& params,
                                   const SparseIndex& index, const RowSample& rows) {
  if (input.q.device.kind == Device::Kind::kCuda) {
    return mass_recall_cuda(input, params, index, rows);
  }
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  std::vector<double> recall(index.heads.size(), 1.0);
  std::vector<std::uint8_t> wanted(index.heads.size());
  std::transform(index.heads.begin(), index.heads.end(), wanted.begin(), [](const HeadIndex& head) {
    return head.kind == HeadIndex::Kind::kDense ? 0 : 1;
  });
  PackedKeys packed(kernels, input, params, input.q.tokens());
  std::vector<Sample> samples(index.batch);
  VisibleKeys visible;
  for (std::int64_t b = 0; b < index.batch; ++b) {
    const SequenceGeometry& geometry = packed.geometry()[b];
    Sample& sample = samples[b];
    sample.q_len = geometry.q_len;
    sample.rows = rows.count(geometry.q_len);
    sample.visible.reset(sample.rows, geometry.kv_len);
    for (std::int64_t i = 0; i < sample.rows; ++i) {
      sample.visible.collect(i, geometry, nullptr, sample.row(i), visible);
    }
  }
  packed.for_each_head<Worker>(wanted, [&](std::int64_t b, std::int64_t h, Worker& worker, int) {
    recall[b * index.q_heads + h] =
        head_recall(kernels, packed, samples[b], sparse_head(&index, b, h), b, h, worker);
  });
  return recall;
}

void check_rows(std::int64_t rows) {
  if (rows < 1 || rows > kMaxGuardRows) {
    throw InvalidArgument("guard rows is " + std::to_string(rows) + "; legal: 1 to " +
                          std::to_string(kMaxGuardRows));
  }
}

void check(const AttentionInput& input, const AttentionParams& params, const SparseIndex& index) {
  validate_input(input, params);
  validate(index, input.q.batch(), input.q.heads(), input.q.tokens(), key_capacity(input));
}

}  // namespace

std::vector<double> mass_recall(const AttentionInput& input, const AttentionParams& params,
                                const SparseIndex& index, std::int64_t rows) {
  check_rows(rows);
  check(input, params, index);
  return sampled_recall(input, params, index, {rows, 1});
}

std::int64_t guard_rows(const GuardOptions& options, std::int64_t q_len) {
  const RowSample sample{options.rows, kGuardRowsPerSample};
  return std::max<std::int64_t>(sample.count(q_len), 1);
}

void validate(const GuardOptions& options) {
  if (options.mode == GuardMode::kOff) return;
  check_rows(options.rows);
  if (!(options.min_recall >= 0.0 && options.min_recall <= 1.0)) {
    throw InvalidArgument("min_recall is " + std::to_string(options.min_recall) +
                          "; legal: numbers from 0 to 1");
  }
}

void add_recalls(std::span<const double> recalls, const GuardOptions& options, Stats& stats) {
  std::int64_t replaced = 0;
  for (const double recall : recalls) {
    const bool dense = too_low(recall, options);
    stats.recall_sum += dense ? 1.0 : recall;
    replaced += dense ? 1 : 0;
  }
  stats.recall_count += static_cast<std::int64_t>(recalls.size());
  if (replaced > 0) stats.fallbacks["a head's recall was below min_recall"] += replaced;
}

void guard(const AttentionInput& input, const AttentionParams& params, const GuardOptions& options,
           SparseIndex& index, Stats& stats) {
  if (options.mode == GuardMode::kOff) return;
  validate(options);
  const Stopwatch watch;
  check(input, params, index);
  const std::vector<double> recall =
      sampled_recall(input, params, index, {options.rows, kGuardRowsPerSample});
  for (std::size_t i = 0; i < recall.size(); ++i) {
    if (too_low(recall[i], options)) index.heads[i] = {};
  }
  add_recalls(recall, options, stats);
  stats.guard_seconds += watch.seconds();
}

}  // namespace minference

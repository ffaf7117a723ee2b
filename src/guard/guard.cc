#include "minference/guard.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/validate.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "minference/error.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// One bit per key for each sampled row: all visible keys, and those of them that the index keeps.
struct RowBits {
  std::int64_t words = 0;
  std::vector<std::uint64_t> visible;  // [rows][words]
  std::vector<std::uint64_t> kept;

  void reset(std::int64_t rows, std::int64_t kv_len) {
    words = (kv_len + 63) / 64 + 1;
    visible.assign(rows * words, 0);
    kept.assign(rows * words, 0);
  }
};

struct Worker {
  RowBlockScratch all;
  RowBlockScratch kept;
  VisibleKeys visible;
  AlignedBuffer<std::byte> keys;
  RowBits bits;

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params)
      : all(kernels, input, params, 0),
        kept(kernels, input, params, 0),
        keys(kTileKeys * all.block.dim * kernels.element_size) {}
};

double head_recall(const KernelTable& kernels, const AttentionInput& input,
                   const SequenceGeometry& geometry, const HeadIndex* head, std::int64_t b,
                   std::int64_t h, std::int64_t rows, Worker& worker) {
  static_assert(kMaxGuardRows <= kTileRows);
  rows = std::min(rows, geometry.q_len);
  const auto row_at = [&](std::int64_t i) { return geometry.q_len * (i + 1) / rows - 1; };
  worker.all.load(b, h, rows, row_at);
  worker.kept.load(b, h, rows, row_at);
  worker.bits.reset(rows, geometry.kv_len);
  const std::int64_t words = worker.bits.words;
  for (std::int64_t i = 0; i < rows; ++i) {
    worker.visible.mark_row(geometry, nullptr, row_at(i), worker.bits.visible.data() + i * words);
    worker.visible.mark_row(geometry, head, row_at(i), worker.bits.kept.data() + i * words);
  }

  // Two sums of exponentials over the same scores, under the two masks.
  const RowSource source(input, input.k, b, h / (input.q.heads() / input.k.heads()));
  kernels.enter();
  for (std::int64_t key = 0; key < geometry.kv_len; key += kTileKeys) {
    const void* addresses[kTileKeys];
    const std::int64_t count = std::min(kTileKeys, geometry.kv_len - key);
    source.rows(key, count, addresses);
    kernels.pack_keys(addresses, input.k.dtype, count, input.k.dim(), worker.all.block.dim,
                      worker.keys.data());
    std::uint64_t visible[kTileRows];
    std::uint64_t kept[kTileRows];
    for (std::int64_t i = 0; i < rows; ++i) {
      visible[i] = worker.bits.visible[i * words + key / 64];
      kept[i] = worker.bits.kept[i * words + key / 64];
    }
    worker.all.load_keys(worker.keys.data(), count, visible);
    kernels.sum_exponentials(worker.all.block, worker.all.keys);
    worker.kept.load_keys(worker.keys.data(), count, kept);
    kernels.sum_exponentials(worker.kept.block, worker.kept.keys);
  }
  kernels.leave();

  double total = 0.0;
  std::int64_t counted = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const double all = kernels.row_sum(worker.all.block, i);
    const double kept = kernels.row_sum(worker.kept.block, i);
    if (all == 0.0) continue;
    total += kept / all *
             std::exp2(static_cast<double>(worker.kept.block.shift[i]) - worker.all.block.shift[i]);
    counted += 1;
  }
  return counted > 0 ? total / static_cast<double>(counted) : 1.0;
}

}  // namespace

std::vector<double> mass_recall(const AttentionInput& input, const AttentionParams& params,
                                const SparseIndex& index, std::int64_t rows) {
  if (rows < 1 || rows > kMaxGuardRows) {
    throw InvalidArgument("guard rows is " + std::to_string(rows) + "; legal: 1 to " +
                          std::to_string(kMaxGuardRows));
  }
  validate_input(input, params);
  validate(index, input.q.batch(), input.q.heads(), input.q.tokens(), key_capacity(input));
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  std::vector<double> recall(index.heads.size(), 1.0);
  std::vector<std::optional<Worker>> workers(resolve_threads(params.threads));
  parallel_for(
      static_cast<std::int64_t>(recall.size()), params.threads, [&](std::int64_t i, int thread) {
        const std::int64_t b = i / index.q_heads;
        const std::int64_t h = i % index.q_heads;
        const HeadIndex* head = sparse_head(&index, b, h);
        const SequenceGeometry geometry(input, params, b);
        if (head == nullptr || geometry.q_len == 0 || geometry.kv_len == 0) return;
        if (!workers[thread]) workers[thread].emplace(kernels, input, params);
        recall[i] = head_recall(kernels, input, geometry, head, b, h, rows, *workers[thread]);
      });
  return recall;
}

void guard(const AttentionInput& input, const AttentionParams& params, const GuardOptions& options,
           SparseIndex& index, Stats& stats) {
  if (options.mode == GuardMode::kOff) return;
  if (!(options.min_recall >= 0.0 && options.min_recall <= 1.0)) {
    throw InvalidArgument("min_recall is " + std::to_string(options.min_recall) +
                          "; legal: numbers from 0 to 1");
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<double> recall = mass_recall(input, params, index, options.rows);
  std::int64_t replaced = 0;
  for (std::size_t i = 0; i < recall.size(); ++i) {
    if (options.mode == GuardMode::kEnforce && recall[i] < options.min_recall) {
      index.heads[i] = {};
      recall[i] = 1.0;
      ++replaced;
    }
    stats.recall_sum += recall[i];
  }
  stats.recall_count += static_cast<std::int64_t>(recall.size());
  if (replaced > 0) stats.fallbacks["a head's recall was below min_recall"] += replaced;
  stats.guard_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace minference

#include "minference/guard.h"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/library.h"
#include "attention/validate.h"
#include "attention/visible_keys.h"
#include "core/format_number.h"
#include "core/stopwatch.h"
#include "guard/recalls.h"
#include "guard/row_sample.h"
#include "index/kept_mass.h"
#include "minference/error.h"

namespace minference {
namespace {

// Mean over the rows that see anything.
double mean_recall(std::span<const RowMass> masses) {
  double total = 0.0;
  std::int64_t counted = 0;
  for (const RowMass& mass : masses) {
    const double all = mass.kept + mass.left_out;
    if (all == 0.0) continue;
    total += mass.kept / all;
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
  static_assert(kMaxGuardRows <= kRowBlock);
  KeptMassRequest request;
  for (std::int64_t b = 0; b < index.batch; ++b) {
    const std::int64_t q_len = SequenceGeometry(input, params, b).q_len;
    const std::int64_t count = rows.count(q_len);
    std::vector<std::int64_t>& sampled = request.rows.emplace_back(count);
    for (std::int64_t i = 0; i < count; ++i) sampled[i] = RowSample::row(i, count, q_len);
    for (std::int64_t h = 0; h < index.q_heads; ++h) {
      request.heads.push_back(sparse_head(&index, b, h));
    }
  }
  std::vector<double> recall(index.heads.size(), 1.0);
  for_each_kept_mass(input, params, request, [&](std::int64_t i, std::span<const RowMass> masses) {
    recall[i] = mean_recall(masses);
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
    throw InvalidArgument("min_recall is " + format_number(options.min_recall) +
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

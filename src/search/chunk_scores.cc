#include "search/chunk_scores.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"
#include "methods/head_rules.h"
#include "methods/method_table.h"
#include "search/nested_sets.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// Sampled rows: one of each of `count` equal parts of the chunk, at places that differ from part to
// part, because the rows of a row block are not alike.
std::vector<std::int64_t> sample_rows(std::int64_t q_len, std::int64_t count) {
  count = std::min(count, q_len);
  std::vector<std::int64_t> rows(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = q_len * i / count;
    const std::int64_t size = q_len * (i + 1) / count - begin;
    rows[i] = begin + i * 37 % size;
  }
  return rows;
}

// The attention of a few rows of one head, cell by cell: the keys of a cell are in the same sets of
// a grid. One pass over the keys gives every candidate's mass and output.
class CellSums {
 public:
  CellSums(const NestedSets& sets, std::size_t rows, std::int64_t kv_len, std::int64_t dim)
      : sets_(sets),
        kv_len_(kv_len),
        dim_(dim),
        width_(sets.slashes + 1),
        cells_((sets.verticals + 1) * width_),
        mass_(rows * cells_),
        pairs_(rows * cells_),
        outputs_(rows * cells_ * dim) {}

  void add(std::int64_t row, std::int64_t key, float probability, const float* value) {
    const std::int64_t cell =
        row * cells_ + sets_.column_levels[key] * width_ + sets_.run_levels[row * kv_len_ + key];
    pairs_[cell] += 1.0F;
    mass_[cell] += probability;
    float* output = outputs_.data() + cell * dim_;
    for (std::int64_t d = 0; d < dim_; ++d) output[d] += probability * value[d];
  }

  // Adds what the candidates keep of a row, with `weight`.
  void finish_row(std::int64_t row, double weight, CandidateTotals* candidates) {
    sum_from_ends(pairs_.data() + row * cells_, 1);
    sum_from_ends(mass_.data() + row * cells_, 1);
    sum_from_ends(outputs_.data() + row * cells_ * dim_, dim_);
    const float* pairs = pairs_.data() + row * cells_;
    for (std::int64_t i = 0; i < sets_.verticals; ++i) {
      for (std::int64_t j = 0; j < sets_.slashes; ++j) {
        CandidateTotals& totals = candidates[i * sets_.slashes + j];
        if (sets_.dense[i * sets_.slashes + j] != 0) {
          totals.recall += weight;
          totals.dense_pairs += weight * pairs[0];
          continue;
        }
        const std::int64_t lost = (i + 1) * width_ + j + 1;
        totals.recall += weight * (1.0 - std::min(1.0F, mass_[row * cells_ + lost]));
        totals.error += weight * error(row, lost);
        totals.run_pairs += weight * (pairs[0] - pairs[j + 1]);
        totals.column_pairs += weight * (pairs[j + 1] - pairs[lost]);
      }
    }
  }

  // Squared norm of the dense output of a finished row.
  double norm(std::int64_t row) const {
    const float* output = outputs_.data() + row * cells_ * dim_;
    double sum = 0;
    for (std::int64_t d = 0; d < dim_; ++d) sum += static_cast<double>(output[d]) * output[d];
    return sum;
  }

 private:
  // Turns values of cells into sums over all cells that lie at or beyond them in both directions.
  void sum_from_ends(float* cells, std::int64_t size) const {
    const std::int64_t row = width_ * size;
    for (std::int64_t a = sets_.verticals; a >= 0; --a) {
      float* values = cells + a * row;
      for (std::int64_t i = row - size - 1; i >= 0; --i) values[i] += values[i + size];
    }
    for (std::int64_t a = sets_.verticals - 1; a >= 0; --a) {
      float* values = cells + a * row;
      for (std::int64_t i = 0; i < row; ++i) values[i] += values[i + row];
    }
  }

  // Squared distance between the dense output o and that of a candidate which loses the mass p and
  // the weighted values m: (o - m) / (1 - p) - o = (p o - m) / (1 - p).
  double error(std::int64_t row, std::int64_t lost) const {
    const float* o = outputs_.data() + row * cells_ * dim_;
    const float* m = o + lost * dim_;
    const float p = mass_[row * cells_ + lost];
    float sum = 0;
    for (std::int64_t d = 0; d < dim_; ++d) sum += (p * o[d] - m[d]) * (p * o[d] - m[d]);
    const double kept = std::max(1.0 - p, 1e-6);
    return sum / (kept * kept);
  }

  const NestedSets& sets_;
  std::int64_t kv_len_;
  std::int64_t dim_;
  std::int64_t width_;
  std::int64_t cells_;
  std::vector<float> mass_;     // [rows][cells]
  std::vector<float> pairs_;    // [rows][cells]
  std::vector<float> outputs_;  // [rows][cells][dim]
};

// Calls visit(row, key, probability, value of the key in f32) for every key that a sampled row of
// query head h sees.
template <class Visit>
void for_each_probability(const AttentionInput& input, const AttentionParams& params,
                          const PackedKeys& packed, std::int64_t h,
                          const std::vector<std::int64_t>& rows, Visit&& visit) {
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  RowProbabilities probabilities(kernels, input, params);
  const RowSource values(input, input.v, 0, h / (input.q.heads() / input.k.heads()));
  const SequenceGeometry& geometry = packed.geometry()[0];
  const std::int64_t dim = input.v.dim();
  std::vector<float> value(kBatchKeys * dim);
  kernels.enter();
  probabilities.visit_rows(
      packed, 0, h, rows, [&](std::int64_t begin, std::int64_t n_keys, const float* p) {
        const std::int64_t size = std::min(n_keys, geometry.kv_len - begin);
        const void* addresses[kBatchKeys];
        values.rows(begin, size, addresses);
        for (std::int64_t c = 0; c < size; ++c) {
          kernels.sum_rows(addresses + c, input.v.dtype, 1, dim, value.data() + c * dim);
        }
        for (std::size_t r = 0; r < rows.size(); ++r) {
          const float* row = p + r * kProbabilityStride + kMaxLanes;
          const std::int64_t from = std::max<std::int64_t>(geometry.first_key(rows[r]) - begin, 0);
          const std::int64_t to = std::min(geometry.end_key(rows[r]) - begin, size);
          for (std::int64_t c = from; c < to; ++c) {
            visit(static_cast<std::int64_t>(r), begin + c, row[c], value.data() + c * dim);
          }
        }
      });
  kernels.leave();
}

}  // namespace

void add_chunk_scores(const AttentionInput& input, const AttentionParams& params,
                      std::span<const CandidateGrid> grids, std::int64_t rows_wanted,
                      std::span<HeadTotals> heads) {
  const SequenceGeometry geometry(input, params, 0);
  const std::vector<std::int64_t> rows = sample_rows(geometry.q_len, rows_wanted);
  const double weight = static_cast<double>(geometry.q_len) / static_cast<double>(rows.size());
  const std::vector<std::uint8_t> every_head(heads.size(), 1);
  SparseIndex blocks = dense_method().build_index(input, params, {}, {});
  block_sparse_heads(input, params, kBlockSparseTopK, every_head, blocks);

  const auto add_head = [&](const PackedKeys& packed, const LastQEstimate& estimate) {
    HeadTotals& head = heads[estimate.h];
    std::vector<NestedSets> sets;
    for (const CandidateGrid& grid : grids) {
      switch (grid.kind) {
        case HeadPattern::Kind::kVerticalSlash:
          sets.push_back(vertical_slash_sets_of(grid, geometry, estimate, rows));
          break;
        case HeadPattern::Kind::kAShape:
          sets.push_back(a_shape_sets_of(grid, geometry, rows));
          break;
        case HeadPattern::Kind::kBlockSparse:
          sets.push_back(block_sparse_sets_of(grid, geometry, blocks.head(0, estimate.h), rows));
          break;
      }
    }
    std::vector<CellSums> sums;
    sums.reserve(sets.size());
    for (const NestedSets& set : sets) {
      sums.emplace_back(set, rows.size(), geometry.kv_len, input.v.dim());
    }
    for_each_probability(
        input, params, packed, estimate.h, rows,
        [&](std::int64_t row, std::int64_t key, float probability, const float* value) {
          for (CellSums& sum : sums) sum.add(row, key, probability, value);
        });
    for (std::size_t r = 0; r < rows.size(); ++r) {
      CandidateTotals* candidates = head.candidates.data();
      for (std::size_t g = 0; g < grids.size(); ++g) {
        sums[g].finish_row(static_cast<std::int64_t>(r), weight, candidates);
        candidates += grids[g].size();
      }
      head.rows += weight;
      head.norm += weight * sums[0].norm(static_cast<std::int64_t>(r));
      head.causal_pairs +=
          weight * static_cast<double>(geometry.end_key(rows[r]) - geometry.first_key(rows[r]));
    }
    CandidateTotals* candidates = head.candidates.data();
    for (const NestedSets& set : sets) {
      for (const std::uint8_t dense : set.dense) {
        if (dense == 0) candidates->estimate_pairs += set.estimate_pairs;
        ++candidates;
      }
    }
  };
  const KernelTable& kernels = *kernel_table(choose_isa(allows_bf16(input, params)));
  PackedKeys packed(kernels, input, params, geometry.q_len);
  packed.in_waves(every_head, [&](std::span<const std::int64_t> wave) {
    std::vector<std::uint8_t> wanted(heads.size(), 0);
    for (const std::int64_t h : wave) wanted[h] = 1;
    estimate_last_q(input, params, kLastQ, wanted,
                    [&](const LastQEstimate& estimate) { add_head(packed, estimate); });
  });
}

}  // namespace minference

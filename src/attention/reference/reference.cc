#include "attention/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/float16.h"

namespace minference {
namespace {

// Elements [b, t, h, 0 ... dim) of a tensor as doubles, written to `row`.
void load_row(const TensorView& tensor, std::int64_t b, std::int64_t t, std::int64_t h,
              double* row) {
  const void* data = tensor.row(b, t, h);
  for (std::int64_t d = 0; d < tensor.dim(); ++d) row[d] = load_element(data, tensor.dtype, d);
}

// Row of key or value `t` of sequence b, looked up in the block table where there is one.
void load_kv_row(const AttentionInput& input, const TensorView& tensor, std::int64_t b,
                 std::int64_t t, std::int64_t h, double* row) {
  if (input.block_table.empty()) {
    load_row(tensor, b, t, h, row);
    return;
  }
  const std::int64_t page_size = tensor.tokens();
  const std::int64_t page = input.block_table[b * input.pages_per_sequence + t / page_size];
  load_row(tensor, page, t % page_size, h, row);
}

// All rows of one KV head of sequence b, [kv_len][dim].
std::vector<double> load_kv_head(const AttentionInput& input, const TensorView& tensor,
                                 std::int64_t b, std::int64_t kv_head) {
  const std::int64_t length = key_length(input, b);
  std::vector<double> rows(length * tensor.dim());
  for (std::int64_t t = 0; t < length; ++t) {
    load_kv_row(input, tensor, b, t, kv_head, rows.data() + t * tensor.dim());
  }
  return rows;
}

// Four independent sums, only because one would wait for its own additions.
double dot(const double* a, const double* b, std::int64_t size) {
  double sums[4] = {0, 0, 0, 0};
  std::int64_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

double score(const AttentionParams& params, const double* q, const double* k, std::int64_t dim) {
  const double scale =
      params.scale != 0.0F ? params.scale : 1.0 / std::sqrt(static_cast<double>(dim));
  const double scaled = scale * dot(q, k, dim);
  const double cap = params.soft_cap;
  return cap > 0 ? cap * std::tanh(scaled / cap) : scaled;
}

// Which offsets the runs of a head contain, [kv_len].
std::vector<std::uint8_t> covered_offsets(const HeadIndex& head, std::int64_t kv_len) {
  std::vector<std::uint8_t> covered(kv_len, 0);
  for (const OffsetRun& run : head.runs) {
    for (std::int64_t offset = run.begin; offset < std::min(run.end, kv_len); ++offset) {
      if (run.contains(offset)) covered[offset] = 1;
    }
  }
  return covered;
}

// [q_len][kv_len] bytes, 1 where a head of diagonal form keeps the key.
std::vector<std::uint8_t> diagonal_mask(const HeadIndex& head, std::int64_t q_len,
                                        std::int64_t kv_len) {
  const std::vector<std::uint8_t> covered = covered_offsets(head, kv_len);
  const auto covers = [&](std::int64_t row, std::int64_t key) {
    const std::int64_t offset = kv_len - q_len + row - key;
    return offset >= 0 && offset < kv_len && covered[offset] != 0;
  };
  std::vector<std::uint8_t> column(kv_len, 0);
  for (const std::int64_t key : head.columns) {
    if (key < kv_len) column[key] = 1;  // a shorter sequence of the batch may end before
  }

  std::vector<std::uint8_t> mask(q_len * kv_len, 0);
  if (head.rounding == RunRounding::kBox) {
    for (std::int64_t row = 0; row < q_len; ++row) {
      const std::int64_t block_position = kv_len - q_len + row / kRowBlock * kRowBlock;
      std::copy(column.begin(), column.end(), mask.begin() + row * kv_len);
      for (const OffsetRun& run : head.runs) {
        const std::int64_t needed = run.end - run.begin + kRowBlock - 1;
        std::int64_t boxes = needed / kRunBox;
        if (boxes * kRunBox < needed) ++boxes;
        const std::int64_t end = block_position + kRowBlock - run.begin;
        const std::int64_t begin = std::max<std::int64_t>(end - boxes * kRunBox, 0);
        for (std::int64_t key = begin; key < std::min(end, kv_len); ++key) {
          mask[row * kv_len + key] = 1;
        }
      }
    }
    return mask;
  }
  const bool exact = head.rounding == RunRounding::kNone;
  for (std::int64_t row = 0; row < q_len; ++row) {
    // The rows whose offsets count for this one: itself, or all of its row block.
    const std::int64_t first = exact ? row : row / kRowBlock * kRowBlock;
    const std::int64_t last = exact ? row : std::min(first + kRowBlock, q_len) - 1;
    if (!exact && row > first) {  // the rows of a block see the same keys
      std::copy_n(mask.begin() + (row - 1) * kv_len, kv_len, mask.begin() + row * kv_len);
      continue;
    }
    // The keys that are kept with this one: itself, or all of its granule.
    const std::int64_t step = exact ? 1 : kRunGranule;
    for (std::int64_t begin = 0; begin < kv_len; begin += step) {
      const std::int64_t end = std::min(begin + step, kv_len);
      bool covered_here = false;
      for (std::int64_t r = first; r <= last; ++r) {
        for (std::int64_t key = begin; key < end && !covered_here; ++key) {
          covered_here = covers(r, key);
        }
      }
      for (std::int64_t key = begin; key < end; ++key) {
        mask[row * kv_len + key] = covered_here || column[key] != 0 ? 1 : 0;
      }
    }
  }
  return mask;
}

// [q_len][kv_len] bytes, 1 where a head of block form keeps the key.
std::vector<std::uint8_t> block_mask(const HeadIndex& head, std::int64_t q_len,
                                     std::int64_t kv_len) {
  std::vector<std::uint8_t> mask(q_len * kv_len, 0);
  for (std::int64_t row = 0; row < q_len; ++row) {
    const std::int64_t m = row / kRowBlock;
    for (std::int64_t i = head.block_begin[m]; i < head.block_begin[m + 1]; ++i) {
      const std::int64_t first = head.block_ids[i] * kKeyBlock;
      const std::int64_t last = std::min(first + kKeyBlock, kv_len);
      for (std::int64_t key = first; key < last; ++key) mask[row * kv_len + key] = 1;
    }
  }
  return mask;
}

// [q_len][kv_len] bytes, 1 where the index of a head keeps the key, whatever is allowed.
std::vector<std::uint8_t> kept_mask(const HeadIndex& head, std::int64_t q_len,
                                    std::int64_t kv_len) {
  std::vector<std::uint8_t> mask;
  switch (head.kind) {
    case HeadIndex::Kind::kDense:
      mask.assign(q_len * kv_len, 1);
      break;
    case HeadIndex::Kind::kDiagonal:
      mask = diagonal_mask(head, q_len, kv_len);
      break;
    case HeadIndex::Kind::kBlock:
      mask = block_mask(head, q_len, kv_len);
      break;
  }
  const std::int64_t first_dense = q_len - std::min(q_len, head.dense_last_rows);
  std::fill(mask.begin() + first_dense * kv_len, mask.end(), std::uint8_t{1});
  return mask;
}

std::int64_t count(const std::vector<std::uint8_t>& mask) {
  return std::count(mask.begin(), mask.end(), std::uint8_t{1});
}

// One row of attention: writes the normalised sum of values and returns the LSE.
// scores: [keys] of the visible keys; values: their rows; sink: a logit without a value, or -inf.
double attend(const std::vector<double>& scores, const std::vector<const double*>& values,
              double sink, std::vector<double>& out) {
  std::fill(out.begin(), out.end(), 0.0);
  if (scores.empty()) return sink;
  const double maximum = std::max(sink, *std::max_element(scores.begin(), scores.end()));
  constexpr double kNever = -std::numeric_limits<double>::infinity();  // weight 0
  if (sink == kNever &&
      std::all_of(scores.begin(), scores.end(), [](double score) { return score == kNever; })) {
    return kNever;
  }
  double sum = std::exp(sink - maximum);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - maximum);
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * values[i][d];
  }
  for (double& value : out) value /= sum;
  return maximum + std::log(sum);
}

}  // namespace

std::int64_t query_length(const AttentionInput& input, std::int64_t b) {
  return input.q_lens.empty() ? input.q.tokens() : input.q_lens[b];
}

std::int64_t key_length(const AttentionInput& input, std::int64_t b) {
  return input.kv_lens.empty() ? input.k.tokens() : input.kv_lens[b];
}

bool allowed(const AttentionInput& input, const AttentionParams& params, std::int64_t b,
             std::int64_t row, std::int64_t key) {
  const std::int64_t position = key_length(input, b) - query_length(input, b) + row;
  const std::int64_t window = params.sliding_window;
  if (window > 0 && position - key >= window) return false;
  if (!input.mask.empty()) {
    const std::uint64_t* words =
        input.mask.words + b * input.mask.sequence_stride + row * input.mask.row_stride;
    return ((words[key / 64] >> (key % 64)) & 1) != 0;
  }
  return !params.causal || key <= position;
}

std::vector<std::uint8_t> explicit_mask(const AttentionInput& input, const AttentionParams& params,
                                        std::int64_t b, std::int64_t h, const SparseIndex* index) {
  const std::int64_t q_len = query_length(input, b);
  const std::int64_t kv_len = key_length(input, b);
  std::vector<std::uint8_t> mask = index != nullptr ? kept_mask(index->head(b, h), q_len, kv_len)
                                                    : std::vector<std::uint8_t>(q_len * kv_len, 1);
  for (std::int64_t row = 0; row < q_len; ++row) {
    for (std::int64_t key = 0; key < kv_len; ++key) {
      if (!allowed(input, params, b, row, key)) mask[row * kv_len + key] = 0;
    }
  }
  return mask;
}

std::vector<double> row_scores(const AttentionInput& input, const AttentionParams& params,
                               std::int64_t b, std::int64_t h, std::int64_t row) {
  const std::int64_t dim = input.q.dim();
  const std::int64_t kv_head = h / (input.q.heads() / input.k.heads());
  std::vector<double> q(dim);
  std::vector<double> k(dim);
  load_row(input.q, b, row, h, q.data());
  std::vector<double> scores(key_length(input, b));
  for (std::size_t key = 0; key < scores.size(); ++key) {
    load_kv_row(input, input.k, b, static_cast<std::int64_t>(key), kv_head, k.data());
    scores[key] = score(params, q.data(), k.data(), dim);
  }
  return scores;
}

std::vector<double> row_probabilities(const AttentionInput& input, const AttentionParams& params,
                                      std::int64_t b, std::int64_t h, std::int64_t row) {
  std::vector<double> p = row_scores(input, params, b, h, row);
  double maximum = -INFINITY;
  for (std::size_t key = 0; key < p.size(); ++key) {
    if (!allowed(input, params, b, row, static_cast<std::int64_t>(key))) p[key] = -INFINITY;
    maximum = std::max(maximum, p[key]);
  }
  double sum = 0;
  for (double& value : p) {
    value = value == -INFINITY ? 0.0 : std::exp(value - maximum);
    sum += value;
  }
  for (double& value : p) value = sum > 0 ? value / sum : 0.0;
  return p;
}

Stats attention_reference(const AttentionInput& input, const AttentionParams& params,
                          const AttentionOutput& output, const SparseIndex* index) {
  const std::int64_t dim = input.q.dim();
  const std::int64_t v_dim = input.v.dim();
  const std::int64_t group = input.q.heads() / input.k.heads();
  Stats stats;
  stats.method = "reference";
  std::vector<double> q(dim);
  std::vector<double> out(v_dim);
  std::vector<double> scores;
  std::vector<const double*> visible_values;
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t kv_len = key_length(input, b);
    for (std::int64_t h = 0; h < input.q.heads(); ++h) {
      const std::vector<double> keys = load_kv_head(input, input.k, b, h / group);
      const std::vector<double> values = load_kv_head(input, input.v, b, h / group);
      const std::vector<std::uint8_t> mask = explicit_mask(input, params, b, h, index);
      stats.kept_pairs += count(mask);
      stats.causal_pairs += count(explicit_mask(input, params, b, h, nullptr));
      for (std::int64_t row = 0; row < query_length(input, b); ++row) {
        load_row(input.q, b, row, h, q.data());
        scores.clear();
        visible_values.clear();
        for (std::int64_t key = 0; key < kv_len; ++key) {
          if (mask[row * kv_len + key] == 0) continue;
          scores.push_back(score(params, q.data(), keys.data() + key * dim, dim));
          visible_values.push_back(values.data() + key * v_dim);
        }
        const double sink = input.sinks.empty() ? -std::numeric_limits<double>::infinity()
                                                : static_cast<double>(input.sinks[h]);
        const double lse = attend(scores, visible_values, sink, out);
        void* out_row = output.out.row(b, row, h);
        for (std::int64_t d = 0; d < v_dim; ++d) {
          store_element(out_row, output.out.dtype, d, static_cast<float>(out[d]));
        }
        if (!output.lse.empty()) {
          store_element(output.lse.row(b, row, h), DType::kF32, 0, static_cast<float>(lse));
        }
      }
    }
  }
  return stats;
}

}  // namespace minference

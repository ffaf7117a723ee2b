#include "support/block_oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/reference/reference.h"
#include "core/float16.h"

namespace minference::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Bits = std::vector<std::vector<bool>>;
using Matrix = std::vector<std::vector<double>>;

std::int64_t blocks_of(std::int64_t length, std::int64_t size) {
  return (length + size - 1) / size;
}

// One query head of one sequence.
class Head {
 public:
  const std::int64_t q_len;
  const std::int64_t kv_len;

  Head(const AttentionInput& input, const AttentionParams& params, std::int64_t b, std::int64_t h)
      : q_len(query_length(input, b)),
        kv_len(key_length(input, b)),
        input_(input),
        params_(params),
        b_(b),
        h_(h) {}

  std::int64_t dim() const { return input_.q.dim(); }
  std::int64_t position(std::int64_t row) const { return kv_len - q_len + row; }
  bool sees(std::int64_t row, std::int64_t key) const {
    return allowed(input_, params_, b_, row, key);
  }

  double q(std::int64_t row, std::int64_t d) const {
    return load_element(input_.q.row(b_, row, h_), input_.q.dtype, d);
  }
  double k(std::int64_t key, std::int64_t d) const {
    std::int64_t sequence = b_;
    if (!input_.block_table.empty()) {
      const std::int64_t page = key / input_.k.tokens();
      sequence = input_.block_table[b_ * input_.pages_per_sequence + page];
      key %= input_.k.tokens();
    }
    const std::int64_t kv_head = h_ / (input_.q.heads() / input_.k.heads());
    return load_element(input_.k.row(sequence, key, kv_head), input_.k.dtype, d);
  }
  std::vector<double> scores(std::int64_t row) const {
    return row_scores(input_, params_, b_, h_, row);
  }
  double score(double product) const {
    const double scale = params_.scale != 0 ? static_cast<double>(params_.scale)
                                            : 1 / std::sqrt(static_cast<double>(dim()));
    const double cap = params_.soft_cap;
    return cap > 0 ? cap * std::tanh(scale * product / cap) : scale * product;
  }

  std::vector<double> mean_q(std::int64_t begin, std::int64_t end) const {
    return mean(begin, std::min(end, q_len), [&](auto row, auto d) { return q(row, d); });
  }
  std::vector<double> mean_k(std::int64_t begin, std::int64_t end) const {
    return mean(begin, std::min(end, kv_len), [&](auto key, auto d) { return k(key, d); });
  }

  // Whether any row of a block may see any key of a block.
  Bits visible(std::int64_t row_size, std::int64_t key_size) const {
    Bits seen(blocks_of(q_len, row_size), std::vector<bool>(blocks_of(kv_len, key_size)));
    for (std::int64_t row = 0; row < q_len; ++row) {
      for (std::int64_t key = 0; key < kv_len; ++key) {
        if (sees(row, key)) seen[row / row_size][key / key_size] = true;
      }
    }
    return seen;
  }

  // Block 0 and the blocks of the rows' own positions, as far as they are visible.
  Bits forced(std::int64_t size, const Bits& seen) const {
    Bits bits(seen.size(), std::vector<bool>(blocks_of(kv_len, size)));
    for (std::size_t m = 0; m < seen.size(); ++m) {
      if (!seen[m].empty() && seen[m][0]) bits[m][0] = true;
    }
    for (std::int64_t row = 0; row < q_len; ++row) {
      if (position(row) >= 0) bits[row / size][position(row) / size] = true;
    }
    return bits;
  }

 private:
  template <class Element>
  std::vector<double> mean(std::int64_t begin, std::int64_t end, Element&& element) const {
    std::vector<double> result(dim());
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t d = 0; d < dim(); ++d) {
        result[d] += element(i, d) / static_cast<double>(end - begin);
      }
    }
    return result;
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  std::int64_t b_;
  std::int64_t h_;
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Positions by falling value, earlier ones first among equals.
std::vector<std::int64_t> falling(const std::vector<double>& values) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t c) { return values[a] > values[c]; });
  return order;
}

struct Cover {
  std::vector<bool> kept;
  double margin = kInfinity;
};

// The forced ones, then the heaviest, until `share` of all mass or `at_most` are reached.
Cover cover(const std::vector<double>& mass, const std::vector<bool>& forced, double share,
            std::int64_t at_least, std::int64_t at_most) {
  Cover result;
  result.kept = forced;
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  double covered = 0;
  for (std::size_t i = 0; i < mass.size(); ++i) covered += forced[i] ? mass[i] : 0;
  std::int64_t count = std::count(forced.begin(), forced.end(), true);
  double smallest = kInfinity;
  for (const std::int64_t i : falling(mass)) {
    if (forced[i]) continue;
    if (count >= at_least) {
      result.margin = std::min(result.margin, std::abs(covered - share * total) / total);
    }
    if (count >= at_most || (count >= at_least && covered >= share * total)) {
      if (smallest < kInfinity) {
        result.margin = std::min(result.margin, (smallest - mass[i]) / smallest);
      }
      break;
    }
    result.kept[i] = true;
    covered += mass[i];
    smallest = mass[i];
    ++count;
  }
  return result;
}

std::vector<double> softmax(std::vector<double> scores, const std::vector<bool>& visible) {
  double maximum = -kInfinity;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (visible[i]) maximum = std::max(maximum, scores[i]);
  }
  double sum = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = visible[i] ? std::exp(scores[i] - maximum) : 0;
    sum += scores[i];
  }
  for (double& score : scores) score = sum > 0 ? score / sum : 0;
  return scores;
}

// [row blocks][key blocks] scores of means.
Matrix pooled_scores(const Head& head, std::int64_t size) {
  Matrix keys;
  for (std::int64_t key = 0; key < head.kv_len; key += size) {
    keys.push_back(head.mean_k(key, key + size));
  }
  Matrix scores;
  for (std::int64_t row = 0; row < head.q_len; row += size) {
    const std::vector<double> query = head.mean_q(row, row + size);
    scores.emplace_back();
    for (const std::vector<double>& key : keys) {
      scores.back().push_back(head.score(dot(query, key)));
    }
  }
  return scores;
}

// Probabilities of antidiagonal sums, [row cells][key cells].
Matrix antidiagonals(const Head& head, const XAttentionRule& rule) {
  const std::int64_t stride = rule.stride;
  const Bits visible = head.visible(stride, stride);
  Matrix result;
  for (std::int64_t a = 0; a * stride < head.q_len; ++a) {
    const std::int64_t rows = std::min(stride, head.q_len - a * stride);
    std::vector<double> scores;
    for (std::int64_t c = 0; c * stride < head.kv_len; ++c) {
      double sum = 0;
      for (std::int64_t p = 0; p < stride && c * stride + p < head.kv_len; ++p) {
        const std::int64_t row = a * stride + (stride - 1 - p) % rows;
        for (std::int64_t d = 0; d < head.dim(); ++d) {
          sum += head.q(row, d) * head.k(c * stride + p, d);
        }
      }
      scores.push_back(head.score(sum / static_cast<double>(stride) / rule.norm));
    }
    result.push_back(softmax(scores, visible[a]));
  }
  return result;
}

double root_js_divergence(const std::vector<double>& p, const std::vector<double>& q) {
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double mean = (p[i] + q[i]) / 2;
    if (p[i] > 0) sum += p[i] * std::log(p[i] / mean) / 2;
    if (q[i] > 0) sum += q[i] * std::log(q[i] / mean) / 2;
  }
  return std::sqrt(std::max(sum, 0.0));
}

}  // namespace

ExpectedBlocks block_sparse_rule(const AttentionInput& input, const AttentionParams& params,
                                 std::int64_t b, std::int64_t h, std::int64_t top_k) {
  const Head head(input, params, b, h);
  const Bits visible = head.visible(64, 64);
  ExpectedBlocks expected{64, head.forced(64, visible), {}};
  const Matrix scores = pooled_scores(head, 64);
  for (std::size_t m = 0; m < visible.size(); ++m) {
    std::vector<bool>& kept = expected.kept[m];
    const std::vector<bool> forced = kept;
    std::int64_t count = std::count(kept.begin(), kept.end(), true);
    double last = kInfinity;
    double margin = kInfinity;
    for (const std::int64_t n : falling(scores[m])) {
      if (forced[n] || !visible[m][n]) continue;
      if (count >= top_k) {
        margin = last - scores[m][n];
        break;
      }
      kept[n] = true;
      last = scores[m][n];
      ++count;
    }
    expected.margin.push_back(margin);
  }
  return expected;
}

ExpectedBlocks xattention_rule(const AttentionInput& input, const AttentionParams& params,
                               std::int64_t b, std::int64_t h, const XAttentionRule& rule) {
  const Head head(input, params, b, h);
  const std::int64_t size = rule.block_size;
  const Bits visible = head.visible(size, size);
  const Bits forced = head.forced(size, visible);
  const Matrix cells = antidiagonals(head, rule);
  Matrix mass(visible.size(), std::vector<double>(blocks_of(head.kv_len, size)));
  for (std::size_t a = 0; a < cells.size(); ++a) {
    for (std::size_t c = 0; c < cells[a].size(); ++c) {
      mass[a * rule.stride / size][c * rule.stride / size] += cells[a][c];
    }
  }
  ExpectedBlocks expected{size, {}, {}};
  for (std::size_t m = 0; m < visible.size(); ++m) {
    const auto blocks = static_cast<std::int64_t>(mass[m].size());
    const Cover covered = cover(mass[m], forced[m], rule.threshold, 0, blocks);
    expected.kept.push_back(covered.kept);
    expected.margin.push_back(covered.margin);
  }
  return expected;
}

ExpectedBlocks flexprefill_rule(const AttentionInput& input, const AttentionParams& params,
                                std::int64_t b, std::int64_t h, const FlexPrefillRule& rule) {
  const Head head(input, params, b, h);
  const std::int64_t size = rule.block_size;
  const std::int64_t key_blocks = blocks_of(head.kv_len, size);
  const Bits visible = head.visible(size, size);
  const std::int64_t least = std::max<std::int64_t>(blocks_of(rule.min_budget, size), 1);
  ExpectedBlocks expected{size, head.forced(size, visible), {}};
  if (head.kv_len <= std::max(2 * size, least * size)) {
    expected.kept = visible;
    expected.margin.assign(visible.size(), kInfinity);
    return expected;
  }

  // Attention of the chunk's last rows, by key and by offset.
  std::vector<double> vertical(key_blocks);
  std::vector<double> slash(key_blocks);
  const std::int64_t first = std::max<std::int64_t>(head.q_len - size, 0);
  std::vector<bool> last_visible(key_blocks);
  for (std::int64_t row = first; row < head.q_len; ++row) {
    std::vector<bool> seen(head.kv_len);
    for (std::int64_t key = 0; key < head.kv_len; ++key) seen[key] = head.sees(row, key);
    const std::vector<double> p = softmax(head.scores(row), seen);
    for (std::int64_t key = 0; key < head.kv_len; ++key) {
      if (!seen[key]) continue;
      last_visible[key / size] = true;
      vertical[key / size] += p[key] / static_cast<double>(head.q_len - first);
      slash[(head.position(row) - key) / size] += p[key] / static_cast<double>(head.q_len - first);
    }
  }

  std::vector<double> scores;
  const std::vector<double> query = head.mean_q(first, head.q_len);
  for (std::int64_t n = 0; n < key_blocks; ++n) {
    scores.push_back(head.score(dot(query, head.mean_k(n * size, (n + 1) * size))));
  }
  const double d = root_js_divergence(softmax(scores, last_visible), vertical);
  const bool query_aware = d < rule.tau;
  double margin = std::abs(d - rule.tau);

  std::int64_t most = rule.max_budget == 0 ? key_blocks : blocks_of(rule.max_budget, size);
  if (query_aware) most = least;
  std::vector<bool> zero(key_blocks);
  zero[0] = true;
  const Cover columns = cover(vertical, zero, rule.gamma, least, most);
  const Cover diagonals = cover(slash, zero, rule.gamma, least, most);
  margin = std::min({margin, columns.margin, diagonals.margin});

  for (std::int64_t n = 0; n < key_blocks; ++n) {
    for (std::size_t m = 0; m < visible.size(); ++m) {
      if (columns.kept[n] && visible[m][n]) expected.kept[m][n] = true;
    }
    for (std::int64_t row = 0; diagonals.kept[n] && row < head.q_len; ++row) {
      const std::int64_t key = head.position(row) - n * size;
      if (key >= 0 && visible[row / size][key / size]) expected.kept[row / size][key / size] = true;
    }
  }
  if (query_aware) {
    std::vector<double> map;
    const Matrix pooled = pooled_scores(head, size);
    for (std::size_t m = 0; m < visible.size(); ++m) {
      const std::vector<double> p = softmax(pooled[m], visible[m]);
      map.insert(map.end(), p.begin(), p.end());
    }
    const auto entries = static_cast<std::int64_t>(map.size());
    const Cover chosen = cover(map, std::vector<bool>(map.size()), rule.gamma, 0, entries);
    margin = std::min(margin, chosen.margin);
    for (std::int64_t i = 0; i < entries; ++i) {
      if (chosen.kept[i]) expected.kept[i / key_blocks][i % key_blocks] = true;
    }
  }
  expected.margin.assign(visible.size(), margin);
  return expected;
}

ExpectedBlocks inf_llm_rule(const AttentionInput& input, const AttentionParams& params,
                            std::int64_t b, std::int64_t h, const InfLlmRule& rule) {
  const Head head(input, params, b, h);
  const std::int64_t size = rule.block_size;
  const std::int64_t blocks = blocks_of(head.kv_len, size);
  ExpectedBlocks expected{64, {}, {}};
  for (std::int64_t first = 0; first < head.q_len; first += rule.exc_block_size) {
    const std::int64_t end = std::min(first + rule.exc_block_size, head.q_len);
    const std::vector<double> query = head.mean_q(first, end);
    // The past: no initial key, none of the first row's n_local nearest, not all behind its window.
    std::vector<bool> kept(blocks, true);
    std::vector<double> relevance(blocks, -kInfinity);
    for (std::int64_t n = 0; n < blocks; ++n) {
      bool past = n * size >= rule.n_init;
      bool seen = false;
      std::vector<double> scores;
      for (std::int64_t key = n * size; key < (n + 1) * size && past; ++key) {
        past = head.position(first) - key >= rule.n_local;
        if (!past) break;
        seen = seen || head.sees(first, key);
        double product = 0;
        for (std::int64_t d = 0; d < head.dim(); ++d) product += query[d] * head.k(key, d);
        scores.push_back(head.score(product));
      }
      if (!past || !seen) continue;
      kept[n] = false;
      std::sort(scores.rbegin(), scores.rend());
      const std::int64_t count = std::min(rule.repr_topk, size);
      relevance[n] =
          std::accumulate(scores.begin(), scores.begin() + count, 0.0) / static_cast<double>(count);
    }
    double margin = kInfinity;
    double last = kInfinity;
    std::int64_t taken = 0;
    for (const std::int64_t n : falling(relevance)) {
      if (kept[n]) continue;
      if (taken == rule.topk) {
        margin = last - relevance[n];
        break;
      }
      kept[n] = true;
      last = relevance[n];
      ++taken;
    }
    for (std::int64_t row = first; row < end; row += 64) {
      expected.margin.push_back(margin);
      expected.kept.emplace_back();
      for (std::int64_t key = 0; key < head.kv_len; key += 64) {
        expected.kept.back().push_back(kept[key / size]);
      }
    }
  }
  return expected;
}

double expect_kept(const HeadIndex& head, const ExpectedBlocks& expected,
                   const AttentionInput& input, const AttentionParams& params, std::int64_t b,
                   double tolerance) {
  const Bits visible = Head(input, params, b, 0).visible(64, 64);
  std::int64_t compared = 0;
  for (std::size_t m = 0; m < visible.size(); ++m) {
    const std::size_t row_block = m * 64 / expected.size;
    if (!(expected.margin[row_block] > tolerance)) continue;
    ++compared;
    std::vector<bool> kept = visible[m];
    if (head.kind != HeadIndex::Kind::kDense) {
      kept.assign(visible[m].size(), false);
      for (std::int64_t i = head.block_begin[m]; i < head.block_begin[m + 1]; ++i) {
        kept[head.block_ids[i]] = true;
      }
    }
    for (std::size_t n = 0; n < visible[m].size(); ++n) {
      const bool wanted = visible[m][n] && expected.kept[row_block][n * 64 / expected.size];
      EXPECT_EQ(kept[n], wanted) << "row block " << m << ", key block " << n << ", margin "
                                 << expected.margin[row_block];
    }
  }
  return visible.empty() ? 1.0
                         : static_cast<double>(compared) / static_cast<double>(visible.size());
}

}  // namespace minference::test

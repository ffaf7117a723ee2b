#include "support/modality_oracle.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "attention/reference/reference.h"

namespace minference::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kLastRows = 64;
constexpr std::int64_t kForcedColumns = 30;
constexpr std::int64_t kForcedOffsets = 100;

using Set = std::set<std::int64_t>;

class Rule {
 public:
  Rule(const AttentionInput& input, const AttentionParams& params, std::int64_t b, std::int64_t h,
       std::span<const Segment> segments, const ModalityRule& rule)
      : rule_(rule), q_len_(query_length(input, b)), kv_len_(key_length(input, b)) {
    visual_.assign(kv_len_, false);
    for (const Segment& segment : segments) {
      if (segment.modality != Modality::kVisual) continue;
      for (std::int64_t i = segment.begin; i < std::min(segment.end, kv_len_); ++i) {
        visual_[i] = true;
      }
      if (segment.begin < kv_len_) segments_.push_back(segment);
    }
    probabilities_ = [&input, &params, b, h](std::int64_t row) {
      return row_probabilities(input, params, b, h, row);
    };
  }

  ExpectedHead expected() {
    result_.margin = kInfinity;
    result_.kind = segments_.empty() ? 4 : rule_.kind;
    const std::vector<std::vector<std::int64_t>> groups = groups_of_rows();
    const std::vector<std::int64_t>& pictures = groups[1];
    // A grid without lines is judged by what was looked at for them.
    const std::vector<std::int64_t> last = result_.kind == 1 ? pictures : last_rows();
    if (result_.kind == 0 || result_.kind == 1) find_lines(pictures);
    if (result_.kind == 0) result_.kind = choose(groups, last);
    if (result_.kind == 1 && pictures.empty()) {
      result_.head = {};
      return result_;
    }
    if (result_.kind == 1 && lines_.empty()) result_.kind = 4;
    if (result_.kind == 1) {
      grid();
      return result_;
    }
    Set columns;
    Set offsets;
    if (result_.kind == 4) {
      columns = best_columns(last, both);
      offsets = best_offsets(last, both);
    }
    for (const auto& rows : groups) {
      if (rows.empty() || result_.kind == 4) continue;
      const std::vector<int> keys =
          result_.kind == 2 ? std::vector<int>{both} : std::vector<int>{0, 1};
      for (const int modality : keys) {
        columns.merge(best_columns(rows, modality));
        offsets.merge(best_offsets(rows, modality));
      }
    }
    result_.head.kind = HeadIndex::Kind::kDiagonal;
    result_.head.columns.assign(columns.begin(), columns.end());
    for (const std::int64_t offset : offsets) {
      result_.head.runs.push_back({offset, offset + 1, 1});
    }
    return result_;
  }

 private:
  static constexpr int both = 2;  // key modalities: 0 text, 1 visual

  std::int64_t position(std::int64_t row) const { return kv_len_ - q_len_ + row; }
  // Exact attention of a row, computed when it is asked for.
  const std::vector<double>& p(std::int64_t row) const {
    const auto found = p_.find(row);
    return found != p_.end() ? found->second : p_.emplace(row, probabilities_(row)).first->second;
  }
  bool is(std::int64_t key, int modality) const {
    return modality == both || visual_[key] == (modality == 1);
  }

  std::vector<std::int64_t> last_rows() const {
    std::vector<std::int64_t> rows;
    for (std::int64_t row = std::max<std::int64_t>(0, q_len_ - kLastRows); row < q_len_; ++row) {
      rows.push_back(row);
    }
    return rows;
  }

  // Text and visual rows: the last ones of the last unbroken run.
  std::vector<std::vector<std::int64_t>> groups_of_rows() const {
    std::vector<std::vector<std::int64_t>> groups(2);
    for (int modality = 0; modality < 2; ++modality) {
      std::vector<std::int64_t>& rows = groups[modality];
      for (std::int64_t row = q_len_ - 1; row >= 0; --row) {
        const bool belongs = position(row) >= 0 && is(position(row), modality);
        if (belongs && static_cast<std::int64_t>(rows.size()) < kLastRows) {
          rows.insert(rows.begin(), row);
        } else if (!rows.empty()) {
          break;
        }
      }
    }
    return groups;
  }

  std::map<std::int64_t, double> column_mass(const std::vector<std::int64_t>& rows,
                                             int modality) const {
    std::map<std::int64_t, double> mass;
    for (std::int64_t key = 0; key < kv_len_; ++key) {
      double sum = 0;
      for (const std::int64_t row : rows) sum += p(row)[key];
      if (sum > 0 && is(key, modality)) mass[key] = sum;
    }
    return mass;
  }

  Set best_columns(const std::vector<std::int64_t>& rows, int modality) {
    return best(column_mass(rows, modality), kForcedColumns, rule_.vertical);
  }

  Set best_offsets(const std::vector<std::int64_t>& rows, int modality) {
    std::map<std::int64_t, double> mass;
    for (const std::int64_t row : rows) {
      for (std::int64_t key = 0; key <= position(row); ++key) {
        if (p(row)[key] > 0 && is(key, modality)) mass[position(row) - key] += p(row)[key];
      }
    }
    return best(mass, kForcedOffsets, rule_.slash);
  }

  // Positions below `forced` and the heaviest others.
  Set best(const std::map<std::int64_t, double>& mass, std::int64_t forced, std::int64_t budget) {
    Set kept;
    for (std::int64_t i = 0; i < std::min(forced, kv_len_); ++i) kept.insert(i);
    std::vector<std::pair<double, std::int64_t>> others;
    for (const auto& [i, value] : mass) {
      if (i >= forced) others.emplace_back(-value, i);
    }
    std::sort(others.begin(), others.end());
    const auto room = static_cast<std::size_t>(std::max<std::int64_t>(budget - forced, 0));
    for (std::size_t n = 0; n < std::min(room, others.size()); ++n) kept.insert(others[n].second);
    if (room > 0 && room < others.size()) {
      decide(others[room - 1].first / others[room].first - 1);
    }
    return kept;
  }

  void decide(double margin) { result_.margin = std::min(result_.margin, std::abs(margin)); }

  static double total(const std::map<std::int64_t, double>& mass) {
    double sum = 0;
    for (const auto& [i, value] : mass) sum += value;
    return sum;
  }

  double kept_share(const std::vector<std::int64_t>& rows, const Set& columns) const {
    const std::map<std::int64_t, double> mass = column_mass(rows, both);
    double kept = 0;
    for (const auto& [key, value] : mass) kept += columns.count(key) > 0 ? value : 0;
    return total(mass) > 0 ? kept / total(mass) : 0;
  }

  int choose(const std::vector<std::vector<std::int64_t>>& groups,
             const std::vector<std::int64_t>& last) {
    if (!lines_.empty()) {
      double outside = 0;
      double on_lines = 0;
      for (const auto& [key, value] : column_mass(groups[1], both)) {
        if (key < initial() || position(groups[1].front()) - key < rule_.n_local) continue;
        outside += value;
        on_lines += line_tokens_.count(key) > 0 ? value : 0;
      }
      if (outside > 0) {
        decide(on_lines / outside - rule_.grid_share);
        if (on_lines >= rule_.grid_share * outside) return 1;
      }
    }
    double by_query = 0;
    double by_pair = 0;
    for (const auto& rows : groups) {
      if (rows.empty()) continue;
      const double own = kept_share(rows, best_columns(rows, both));
      Set pairs = best_columns(rows, 0);
      pairs.merge(best_columns(rows, 1));
      by_query = std::max(by_query, own - kept_share(rows, best_columns(last, both)));
      by_pair = std::max(by_pair, kept_share(rows, pairs) - own);
    }
    decide(by_pair - rule_.min_gain);
    if (by_pair >= rule_.min_gain) return 3;
    decide(by_query - rule_.min_gain);
    return by_query >= rule_.min_gain ? 2 : 4;
  }

  std::int64_t initial() const { return std::max(rule_.n_init, segments_.front().begin); }

  void find_lines(const std::vector<std::int64_t>& pictures) {
    if (pictures.empty()) return;
    const std::map<std::int64_t, double> mass = column_mass(pictures, both);
    for (const Segment& segment : segments_) {
      std::vector<std::pair<double, std::int64_t>> heavy;
      std::int64_t tokens = 0;
      for (std::int64_t key = segment.begin; key < std::min(segment.end, kv_len_); ++key) {
        if (key < kForcedColumns || position(pictures.front()) - key < kForcedOffsets) continue;
        ++tokens;
        if (mass.count(key) > 0) heavy.emplace_back(-mass.at(key), key);
      }
      std::sort(heavy.begin(), heavy.end());
      const auto most = static_cast<std::size_t>(rule_.fold_columns);
      if (heavy.size() > most) {
        decide(heavy[most - 1].first / heavy[most].first - 1);
        heavy.resize(most);
      }
      double sum = 0;
      for (const auto& [value, key] : heavy) sum -= value;
      std::vector<std::int64_t> strides;
      if (segment.stride > 0) strides.push_back(segment.stride);
      for (std::int64_t s = rule_.min_stride;
           segment.stride == 0 && s <= std::min(rule_.max_stride, tokens / 4); ++s) {
        strides.push_back(s);
      }
      double best = -kInfinity;
      double second = -kInfinity;
      std::int64_t stride = 0;
      std::int64_t phase = 0;
      for (const std::int64_t s : strides) {
        std::vector<double> folded(s);
        for (const auto& [value, key] : heavy) folded[(key - segment.begin) % s] -= value;
        for (std::int64_t i = 0; i < s; ++i) {
          const double excess = folded[i] - sum / static_cast<double>(s);
          if (excess > best) {
            second = best;
            best = excess;
            stride = s;
            phase = i;
          } else {
            second = std::max(second, excess);
          }
        }
      }
      if (stride == 0 || heavy.empty()) continue;
      decide((best - second) / sum);
      lines_.push_back(stride);
      for (std::int64_t key = segment.begin + phase; key < std::min(segment.end, kv_len_);
           key += stride) {
        line_tokens_.insert(key);
      }
    }
  }

  void grid() {
    result_.head.kind = HeadIndex::Kind::kBlock;
    result_.head.block_begin = {0};
    for (std::int64_t first = 0; first < q_len_; first += 64) {
      std::set<std::int32_t> blocks;
      for (std::int64_t row = first; row < std::min(first + 64, q_len_); ++row) {
        const std::int64_t at = position(row);
        for (std::int64_t key = 0; key <= at; ++key) {
          const bool all = !visual_[at] || line_tokens_.count(at) > 0;
          if (all || key < initial() || at - key < rule_.n_local || line_tokens_.count(key) > 0) {
            blocks.insert(static_cast<std::int32_t>(key / 64));
          }
        }
      }
      result_.head.block_ids.insert(result_.head.block_ids.end(), blocks.begin(), blocks.end());
      result_.head.block_begin.push_back(static_cast<std::int64_t>(result_.head.block_ids.size()));
    }
  }

  const ModalityRule& rule_;
  std::int64_t q_len_;
  std::int64_t kv_len_;
  std::vector<bool> visual_;
  std::vector<Segment> segments_;
  std::function<std::vector<double>(std::int64_t)> probabilities_;
  mutable std::map<std::int64_t, std::vector<double>> p_;
  std::vector<std::int64_t> lines_;  // strides
  Set line_tokens_;
  ExpectedHead result_;
};

}  // namespace

ExpectedHead modality_rule(const AttentionInput& input, const AttentionParams& params,
                           std::int64_t b, std::int64_t h, std::span<const Segment> segments,
                           const ModalityRule& rule) {
  return Rule(input, params, b, h, segments, rule).expected();
}

}  // namespace minference::test

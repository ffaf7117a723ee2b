#include "index/covering.h"

#include <algorithm>

#include "index/top_k.h"

namespace minference {
namespace {

constexpr std::int64_t kLocalGranules = 3;  // before the row block's own, that every head keeps
constexpr double kLossStep = 0.95;          // of what one covering loses, in the next

// Share of the chunk's rows that lie `position` or behind it.
double share_of_rows(const MassTable& table, std::int64_t position) {
  const std::int64_t first = table.kv_len - table.q_len;
  const auto behind = static_cast<double>(table.kv_len - std::max(position, first));
  return std::max(behind / static_cast<double>(table.q_len), 0.0);
}

// By distance, mean keys per row block.
std::vector<double> keys_by_distance(const MassTable& table) {
  std::vector<double> keys(table.distances);
  for (std::int64_t i = 0; i < table.distances; ++i) {
    keys[i] = kRunGranule * share_of_rows(table, (i - table.width + 1) * kRunGranule);
  }
  return keys;
}

// By distance, the mass of keys that are no columns where those begin with `least_class`.
std::vector<double> masses_by_distance(const MassTable& table, int least_class) {
  std::vector<double> masses(table.distances, 0.0);
  for (int c = 0; c < least_class; ++c) {
    const float* of_class = table.of_class(c);
    for (std::int64_t i = 0; i < table.distances; ++i) masses[i] += of_class[i];
  }
  return masses;
}

// The distances of coverings whose columns are of one class and more, taken one by one.
class Distances {
 public:
  Distances(const MassTable& table, const std::vector<double>& keys, int least_class)
      : width_(table.width),
        masses_(masses_by_distance(table, least_class)),
        keys_(keys),
        kept_(table.distances, 0) {
    std::vector<float> density(table.distances);
    for (std::int64_t i = 0; i < table.distances; ++i) {
      density[i] = static_cast<float>(masses_[i] / std::max(keys[i], 1e-3));
    }
    ranked_ = descending(density);
    while (!ranked_.empty() && !(masses_[ranked_.back()] > 0.0)) ranked_.pop_back();
    const std::int64_t local = std::min(table.width + kLocalGranules, table.distances);
    for (std::int64_t i = 0; i < local; ++i) take(i);
  }

  // Takes the distance that holds most for its keys and, where it has too few kept neighbours for a
  // run, the heavier of those beside. False when there is none with mass.
  bool take_next() {
    while (taken_ < size(ranked_) && kept_[ranked_[taken_]] != 0) ++taken_;
    if (taken_ == size(ranked_)) return false;
    const std::int64_t i = ranked_[taken_++];
    take(i);
    std::int64_t first = i;
    std::int64_t last = i;
    const auto short_of_a_run = [&] { return last - first + 1 < width_; };
    const auto extend = [&] {
      while (short_of_a_run() && first > 0 && kept_[first - 1] != 0) --first;
      while (short_of_a_run() && last + 1 < size(kept_) && kept_[last + 1] != 0) ++last;
    };
    extend();
    // What reaches the first distance holds the local ones, which are enough.
    while (short_of_a_run()) {
      const bool after = last + 1 < size(kept_) && masses_[last + 1] >= masses_[first - 1];
      take(after ? last + 1 : first - 1);
      extend();
    }
    return true;
  }

  std::int64_t taken() const { return taken_; }  // in the order of what they hold
  double mass() const { return mass_; }
  double run_keys() const { return run_keys_; }
  const std::vector<std::uint8_t>& kept() const { return kept_; }  // groups of at least `width`

 private:
  template <class T>
  static std::int64_t size(const std::vector<T>& values) {
    return static_cast<std::int64_t>(values.size());
  }

  void take(std::int64_t i) {
    kept_[i] = 1;
    mass_ += masses_[i];
    run_keys_ += keys_[i];
  }

  std::int64_t width_;
  std::vector<double> masses_;
  const std::vector<double>& keys_;
  std::vector<std::uint8_t> kept_;
  std::vector<std::int64_t>
      ranked_;  // distances with mass, those first that hold most for their keys
  std::int64_t taken_ = 0;
  double mass_ = 0;
  double run_keys_ = 0;
};

// Those whose columns begin with `least_class`.
void add_coverings(const MassTable& table, const std::vector<double>& keys, int least_class,
                   std::vector<Covering>& found) {
  double column_mass = 0;
  double column_keys = 0;
  for (const MassTable::Column& column : table.columns) {
    if (column.weight_class < least_class) continue;
    column_mass += column.mass;
    column_keys += share_of_rows(table, column.key);
  }
  Distances distances(table, keys, least_class);
  const auto covering = [&] {
    const double mass = column_mass + distances.mass();
    return Covering{table.total > 0 ? std::min(mass / table.total, 1.0) : 1.0, distances.run_keys(),
                    column_keys, least_class, distances.taken()};
  };
  found.push_back(covering());
  double next_loss = kLossStep * (1 - found.back().share);
  while (distances.take_next()) {
    const Covering next = covering();
    if (1 - next.share > next_loss) continue;
    found.push_back(next);
    next_loss = kLossStep * (1 - next.share);
  }
  found.push_back(covering());
}

}  // namespace

std::vector<Covering> coverings(const MassTable& table, const KeyCosts& costs) {
  const std::vector<double> keys = keys_by_distance(table);
  std::vector<Covering> found;
  bool in_class[MassTable::kClasses] = {true};
  for (const MassTable::Column& column : table.columns) in_class[column.weight_class] = true;
  for (int c = 1; c < MassTable::kClasses; ++c) {
    // Without columns in the class below, these would be that one's coverings again.
    if (in_class[c - 1]) add_coverings(table, keys, c, found);
  }
  const auto cost = [&](const Covering& covering) {
    return costs.run * covering.run_keys + costs.column * covering.column_keys;
  };
  std::stable_sort(found.begin(), found.end(), [&](const Covering& a, const Covering& b) {
    return cost(a) != cost(b) ? cost(a) < cost(b) : a.share > b.share;
  });
  double share = -1;
  std::erase_if(found, [&](const Covering& covering) {
    const bool worse = covering.share <= share;
    share = std::max(share, covering.share);
    return worse;
  });
  return found;
}

HeadIndex Covering::head(const MassTable& table) const {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  for (const MassTable::Column& column : table.columns) {
    if (column.weight_class >= least_class) head.columns.push_back(column.key);
  }
  const std::vector<double> keys = keys_by_distance(table);
  Distances distances(table, keys, least_class);
  while (distances.taken() < taken && distances.take_next()) {
  }
  const std::vector<std::uint8_t>& kept = distances.kept();
  // An offset of d granules reaches, from the rows of a block, `width` granules: the distances
  // d - width + 1 to d.
  for (std::int64_t i = 0; i < table.distances; ++i) {
    if (kept[i] == 0) continue;
    std::int64_t end = i;
    while (end + 1 < table.distances && kept[end + 1] != 0) ++end;
    const std::int64_t first = i;  // distance i - width + 1, whose run begins at offset i
    const std::int64_t last = end - table.width + 1;
    head.runs.push_back({first * kRunGranule, std::max(first, last) * kRunGranule + 1, 1});
    i = end;
  }
  return head;
}

}  // namespace minference

#include "search/nested_sets.h"

#include <algorithm>
#include <functional>

#include "methods/head_rules.h"

namespace minference {
namespace {

// Sets the level of every key that `head` keeps for a sampled row. Called from the largest set to
// the smallest, it leaves the smallest level.
void mark_runs(const HeadIndex& head, const SequenceGeometry& geometry,
               std::span<const std::int64_t> rows, std::uint8_t level, NestedSets& sets) {
  VisibleKeys visible;
  VisibleKeys::Tile tile;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::uint8_t* levels = sets.run_levels.data() + r * static_cast<std::size_t>(geometry.kv_len);
    visible.start(geometry, &head, rows[r], rows[r] + 1);
    while (visible.next_keys(tile)) {
      const std::int64_t count = std::min(tile.count, geometry.kv_len - tile.begin);
      for (std::int64_t c = 0; c < count; ++c) {
        if (tile.mask == nullptr || (tile.mask[0] >> c & 1U) != 0) levels[tile.begin + c] = level;
      }
    }
  }
}

void mark_columns(const HeadIndex& head, std::uint8_t level, NestedSets& sets) {
  for (const std::int64_t key : head.columns) sets.column_levels[key] = level;
}

// Marks the candidates for which dense(i, j) holds; with it hold all of larger budgets.
void mark_dense(NestedSets& sets, const std::function<bool(std::int64_t, std::int64_t)>& dense) {
  std::int64_t first = sets.slashes;  // smallest dense j of the row of candidates
  for (std::int64_t i = 0; i < sets.verticals; ++i) {
    while (first > 0 && dense(i, first - 1)) --first;
    const auto row = sets.dense.begin() + i * sets.slashes;
    std::fill(row + first, row + sets.slashes, 1);
  }
}

}  // namespace

NestedSets::NestedSets(const CandidateGrid& grid, std::size_t rows, std::int64_t kv_len)
    : verticals(static_cast<std::int64_t>(grid.vertical.size())),
      slashes(static_cast<std::int64_t>(grid.slash.size())),
      column_levels(kv_len, static_cast<std::uint8_t>(verticals)),
      run_levels(rows * static_cast<std::size_t>(kv_len), static_cast<std::uint8_t>(slashes)),
      dense(grid.size(), 0) {}

NestedSets vertical_slash_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                                  const LastQEstimate& estimate,
                                  std::span<const std::int64_t> rows) {
  NestedSets sets(grid, rows.size(), geometry.kv_len);
  sets.estimate_pairs = static_cast<double>(estimate.rows) * static_cast<double>(estimate.kv_len);
  // Columns and runs of a head depend on one budget each.
  std::vector<HeadIndex> columns(sets.verticals);
  std::vector<HeadIndex> runs(sets.slashes);
  for (std::int64_t level = std::max(sets.verticals, sets.slashes) - 1; level >= 0; --level) {
    const std::int64_t i = std::min(level, sets.verticals - 1);
    const std::int64_t j = std::min(level, sets.slashes - 1);
    HeadIndex head = vertical_slash_sets(estimate, grid.vertical[i], grid.slash[j]);
    if (level < sets.verticals) {
      columns[i].kind = head.kind;
      columns[i].columns = head.columns;
      mark_columns(head, static_cast<std::uint8_t>(i), sets);
    }
    if (level < sets.slashes) {
      head.columns.clear();
      mark_runs(head, geometry, rows, static_cast<std::uint8_t>(j), sets);
      runs[j] = std::move(head);
    }
  }
  mark_dense(sets, [&](std::int64_t i, std::int64_t j) {
    if (budgets_cover_all(grid.vertical[i], grid.slash[j], geometry.kv_len)) return true;
    HeadIndex head = columns[i];
    head.runs = runs[j].runs;
    return dense_where_cheaper(std::move(head), geometry.q_len, geometry.kv_len).kind ==
           HeadIndex::Kind::kDense;
  });
  return sets;
}

NestedSets a_shape_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                           std::span<const std::int64_t> rows) {
  NestedSets sets(grid, rows.size(), geometry.kv_len);
  for (std::int64_t i = sets.verticals - 1; i >= 0; --i) {
    const std::int64_t end = std::min(grid.vertical[i], geometry.kv_len);
    std::fill_n(sets.column_levels.begin(), end, static_cast<std::uint8_t>(i));
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const auto levels = sets.run_levels.begin() + static_cast<std::ptrdiff_t>(r) * geometry.kv_len;
    const std::int64_t end = geometry.position(rows[r]) + 1;
    for (std::int64_t j = sets.slashes - 1; j >= 0; --j) {
      const std::int64_t begin = std::max<std::int64_t>(end - grid.slash[j], 0);
      std::fill(levels + begin, levels + end, static_cast<std::uint8_t>(j));
    }
  }
  mark_dense(sets, [&](std::int64_t i, std::int64_t j) {
    return a_shape_head(grid.vertical[i], grid.slash[j], geometry.kv_len).kind ==
           HeadIndex::Kind::kDense;
  });
  return sets;
}

NestedSets block_sparse_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                                const HeadIndex& head, std::span<const std::int64_t> rows) {
  NestedSets sets(grid, rows.size(), geometry.kv_len);
  if (head.kind == HeadIndex::Kind::kDense) {
    sets.dense[0] = 1;
  } else {
    mark_runs(head, geometry, rows, 0, sets);
  }
  return sets;
}

}  // namespace minference

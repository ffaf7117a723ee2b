// Class SparseIndex: which keys the heads of a call may see.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "minference/error.h"
#include "minference/sparse_index.h"

namespace nb = nanobind;

namespace minference::python {
namespace {

using Lists = std::vector<std::vector<std::int64_t>>;

// Columns and diagonals, both in any order and with repetitions: one list a sequence and head.
SparseIndex vertical_slash(std::int64_t batch, std::int64_t q_heads, Lists columns,
                           const Lists& offsets) {
  const auto heads = static_cast<std::size_t>(std::max<std::int64_t>(batch * q_heads, 0));
  if (columns.size() != heads || offsets.size() != heads) {
    throw InvalidArgument("columns has " + std::to_string(columns.size()) + " lists and offsets " +
                          std::to_string(offsets.size()) + "; legal: batch * q_heads, " +
                          std::to_string(heads));
  }
  SparseIndex index;
  index.batch = batch;
  index.q_heads = q_heads;
  index.heads.resize(heads);
  for (std::size_t i = 0; i < heads; ++i) {
    HeadIndex& head = index.heads[i];
    head.kind = HeadIndex::Kind::kDiagonal;
    std::sort(columns[i].begin(), columns[i].end());
    columns[i].erase(std::unique(columns[i].begin(), columns[i].end()), columns[i].end());
    head.columns = std::move(columns[i]);
    std::vector<OffsetRun> runs;
    runs.reserve(offsets[i].size());
    for (const std::int64_t offset : offsets[i]) runs.push_back({offset, offset + 1});
    // A covered offset covers whole row blocks, so that nearer ones overlap anyway.
    head.runs = merge_runs(std::move(runs), kRowBlock - 1);
  }
  return index;
}

}  // namespace

void bind_sparse_index(nb::module_& module) {
  nb::class_<SparseIndex>(module, "SparseIndex", "Which keys the query heads of a call may see.")
      .def_static("vertical_slash", &vertical_slash, nb::arg("batch"), nb::arg("q_heads"),
                  nb::arg("columns"), nb::arg("offsets"),
                  "Columns (key positions) and diagonals (distance of the key behind the query) of "
                  "each\nsequence and head, one list each. Diagonals are rounded up to tiles of 64 "
                  "rows and 32 keys.\nRaises ValueError unless both have batch * q_heads lists.")
      .def_ro("batch", &SparseIndex::batch)
      .def_ro("q_heads", &SparseIndex::q_heads);
}

}  // namespace minference::python

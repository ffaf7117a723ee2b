// Coverings: the ways to cover a share of a head's attention mass with columns and runs that are worth
// their cost.
#pragma once

#include <cstdint>
#include <vector>

#include "index/coverage.h"
#include "minference/sparse_index.h"

namespace minference {

// What a kept key costs in a row block, in any unit.
struct KeyCosts {
  double run = 1;
  double column = 1;
};

// Columns of some class and more, and distances.
struct Covering {
  double share = 0;     // of the sampled mass that it holds
  double run_keys = 0;  // mean number of keys per row block, of the runs
  double column_keys = 0;
  int least_class = 0;
  std::int64_t taken = 0;  // distances beside the local ones, those that hold most for their keys

  // The diagonal form, runs not exact.
  HeadIndex head(const MassTable& table) const;
};

// Coverings from the cheapest on, each of more mass than those before it, up to one that holds
// all: for every class that columns may begin with, steps of about a twentieth of what is still lost.
// None holds less than another that is cheaper. The first granule and the row block's own with the
// three before them are always in them.
std::vector<Covering> coverings(const MassTable& table, const KeyCosts& costs);

}  // namespace minference

// What the guard has to measure, in fp64 over the explicit mask.
#pragma once

#include <vector>

#include "guard/row_sample.h"
#include "support/problem.h"

namespace minference::test {

// Of each (sequence, query head): the mean over the sampled rows that see anything of the mass on keys
// that the problem's index keeps; 1 where no row does.
std::vector<double> exact_recall(const Problem& problem, const RowSample& sample);

}  // namespace minference::test

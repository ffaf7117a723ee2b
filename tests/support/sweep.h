// The one sweep of attention: which cases every kernel is tested on, and how a result is judged.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "minference/attention.h"
#include "minference/isa.h"
#include "support/problem.h"

namespace minference::test {

// Runs attention at one ISA level.
using Runner = std::function<Stats(const AttentionInput&, const AttentionParams&,
                                   const AttentionOutput&, const SparseIndex*, IsaLevel)>;

// Each axis of the grid swept alone, from the defaults of Case.
std::vector<Case> shape_cases();    // lengths, heads, head dims, batches
std::vector<Case> long_cases();     // many keys, up to and around 2^16
std::vector<Case> storage_cases();  // dtypes, layouts, pages
std::vector<Case> value_cases();    // orders of magnitude, ties, denormals
std::vector<Case> pattern_cases();  // both forms of index at every budget, short to long
std::vector<Case> feature_cases();  // scale, soft cap, sinks, window, mask, alone and in pairs
// Points drawn from the whole grid, kept to a cost that a unit test can afford.
std::vector<Case> random_cases(std::int64_t count, std::uint64_t seed);

// MINFERENCE_SWEEP_STRIDE=n in the environment: under an emulator or a memory checker every n-th case
// is run. 1 when it is not set; throws InvalidArgument when it is no number from 1 on.
std::size_t sweep_stride();

// Runs the case at each level and judges it against the fp64 reference:
//  - nothing but the rows of the output and LSE may be written, and they must be finite;
//  - the level that ran and the counts of pairs must be those of the reference;
//  - the error must be at most twice that of a naive run of the same precision (naive.h), in the
//    maximum and in the mean square, plus a few units of rounding: see sweep.cc.
// Failures name the case.
void expect_matches_reference(const Case& c, const Runner& run,
                              const std::vector<IsaLevel>& levels);
// The same for a problem that was made from the case and changed since.
void expect_matches_reference(const Case& c, const Problem& problem, const Runner& run,
                              const std::vector<IsaLevel>& levels);

}  // namespace minference::test

// What every candidate pattern keeps, and loses, of the attention of one chunk's heads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "minference/attention.h"
#include "search/candidates.h"

namespace minference {

// Sums over sampled rows, each counted for as many rows as it stands for.
struct CandidateTotals {
  double recall = 0;          // kept mass
  double error = 0;           // squared distance of the output from that of dense attention
  double run_pairs = 0;       // kept pairs: on diagonals, in a window or in blocks
  double column_pairs = 0;    // kept pairs in columns only
  double dense_pairs = 0;     // pairs of chunks in which the pattern runs dense
  double estimate_pairs = 0;  // pairs of the estimate that it needs
};

struct HeadTotals {
  double rows = 0;
  double norm = 0;                          // squared norm of the dense output
  double causal_pairs = 0;                  // pairs of dense attention
  std::vector<CandidateTotals> candidates;  // those of all grids, in order
};

// Adds `rows` sampled rows of the chunk, a legal causal input of one sequence, to heads [q_heads].
// Sets are built by the code of the method minference, from this chunk's own estimate. Sinks take
// no part. Each head is measured by one thread, in the same order whatever their number.
void add_chunk_scores(const AttentionInput& input, const AttentionParams& params,
                      std::span<const CandidateGrid> grids, std::int64_t rows,
                      std::span<HeadTotals> heads);

}  // namespace minference

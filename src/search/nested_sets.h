// NestedSets: the keys that every candidate of one grid keeps of one head, as two levels per key.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/visible_keys.h"
#include "index/last_q.h"
#include "minference/sparse_index.h"
#include "search/candidates.h"

namespace minference {

// Candidate (i, j) of a grid of I x J keeps a key for a row when column_level <= i or
// run_level <= j.
struct NestedSets {
  std::int64_t verticals = 0;               // I
  std::int64_t slashes = 0;                 // J
  std::vector<std::uint8_t> column_levels;  // [kv_len], I: in no candidate's columns
  std::vector<std::uint8_t> run_levels;     // [rows][kv_len], J: in no candidate's runs or blocks
  std::vector<std::uint8_t> dense;          // [I * J], 1: the method runs the head dense
  double estimate_pairs = 0;                // of the estimate of candidates that are not dense

  NestedSets(const CandidateGrid& grid, std::size_t rows, std::int64_t kv_len);
};

// The sets of the sampled `rows` of one sequence, from the same rules as the method minference.
NestedSets vertical_slash_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                                  const LastQEstimate& estimate,
                                  std::span<const std::int64_t> rows);
NestedSets a_shape_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                           std::span<const std::int64_t> rows);
// `head`: the block_sparse head of the chunk.
NestedSets block_sparse_sets_of(const CandidateGrid& grid, const SequenceGeometry& geometry,
                                const HeadIndex& head, std::span<const std::int64_t> rows);

}  // namespace minference

// Coverage estimator: where the attention mass of rows spread over a chunk lies, by key and by distance
// at once, so that the cheapest columns and runs that hold a given share of it follow (covering.h).
//
// Column sums and diagonal sums alone count a heavy key twice, once in its column and once in every
// diagonal that crosses it. Here what lies at a distance is kept apart by how heavy the key is, so
// that what a set of columns leaves to the diagonals is known for several sets without a second look
// at the scores.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// The mass of one query head. Keys are looked at in granules of kRunGranule. The distance of a
// granule to a row block is that of their positions: the granule of the block's first row less its
// own. A row block of kRowBlock rows touches `width` granules itself, whose distances are
// 1 - width to 0; a shorter block at the end of a chunk is taken for a whole one.
struct MassTable {
  // The first keys, whose mass counts nowhere: heads put there what they have no use for, up to nearly
  // all of it (arXiv 2309.17453), and what they say is the rest.
  static constexpr std::int64_t kSinks = 4;
  // Classes of keys: class 0 is light; a key of class c > 0 has at least 2^c times the mean mass of
  // a key, the last one also what is more.
  static constexpr int kClasses = 9;

  struct Column {
    std::int64_t key = 0;
    float mass = 0;
    int weight_class = 0;
  };

  std::int64_t b = 0;
  std::int64_t h = 0;
  std::int64_t q_len = 0;
  std::int64_t kv_len = 0;
  double total = 0;  // of all sampled rows, without the sinks
  // Of class 1 and more, ascending. The keys of the first granule have the last class.
  std::vector<Column> columns;
  std::int64_t width = 0;
  std::int64_t distances = 0;      // number of them, the first one being 1 - width
  std::vector<float> by_distance;  // [kClasses][distances]

  const float* of_class(int c) const { return by_distance.data() + c * distances; }
};

// Rows spread evenly over a chunk of q_len, `count` or all of them.
std::vector<std::int64_t> spread_rows(std::int64_t q_len, std::int64_t count);

// Calls consume(table) for the (sequence, query head) that have queries and keys and whose entry of
// wanted [batch * q_heads] is not 0, from worker threads, several at a time. `rows`: sampled rows of
// each, 1 to 64, spread evenly; causal inputs without explicit mask only. Memory: the packed keys, at
// most 1 GiB at a time; scores are computed twice instead of being kept.
void estimate_coverage(const AttentionInput& input, const AttentionParams& params,
                       std::int64_t rows, std::span<const std::uint8_t> wanted,
                       const std::function<void(const MassTable&)>& consume);

}  // namespace minference

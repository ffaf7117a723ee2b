// Kept mass: what share of the attention mass of sampled rows an index keeps, exactly, head by head.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference {

// Shares of all that a row sees; both 0 when it sees nothing.
struct RowMass {
  double kept = 0;
  double left_out = 0;
};

struct KeptMassRequest {
  // Of each sequence, ascending and at most 64.
  std::vector<std::vector<std::int64_t>> rows;
  // Indices of [batch * q_heads] heads; null: the head is not looked at.
  std::vector<const HeadIndex*> heads;
  // Keys before it, at most 32, count in no RowMass, but in what a row sees.
  std::int64_t least_key = 0;
};

// Calls consume(i, masses) for the wanted heads i whose sequence has rows and keys, with the masses of
// the sequence's rows, from this thread. All query heads of a KV head go through its keys together,
// and a batch of keys is packed when it is needed. Memory: a bit per key for each row of each head of
// a sequence.
void for_each_kept_mass(
    const AttentionInput& input, const AttentionParams& params, const KeptMassRequest& request,
    const std::function<void(std::int64_t i, std::span<const RowMass> masses)>& consume);

}  // namespace minference

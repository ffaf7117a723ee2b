// Block relevance: how well the keys of a block match the mean query of a group of rows.
//
// Always in f32, as the pooled estimates: one query stands for hundreds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/block_grid.h"
#include "minference/attention.h"

namespace minference {

struct BlockRelevanceOptions {
  std::int64_t block_size = 0;       // keys of a block, a multiple of kKeyBlock
  std::int64_t group_rows = 0;       // rows of a group, counted from the chunk's first one
  std::int64_t representatives = 0;  // keys that stand for a block, 1 or more
};

// Relevance of blocks to the groups of one query head.
struct BlockRelevance {
  BlockGrid::Range blocks;
  std::vector<float> values;  // [groups][blocks]

  std::span<const float> group(std::int64_t g) const {
    return {values.data() + g * blocks.size(), static_cast<std::size_t>(blocks.size())};
  }
};

// For every (sequence, query head), [batch * q_heads], and each group of its rows: the mean of the
// `representatives` highest scores that keys of a block reach against the group's mean query, scale
// and soft cap applied. blocks[b]: the blocks of sequence b to rate, whole ones; none: the heads of
// the sequence stay empty. Keys are read once per KV head.
std::vector<BlockRelevance> block_relevance(const AttentionInput& input,
                                            const AttentionParams& params,
                                            const BlockRelevanceOptions& options,
                                            std::span<const BlockGrid::Range> blocks);

}  // namespace minference

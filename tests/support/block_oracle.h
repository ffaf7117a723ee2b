// The rules of the block methods as plain fp64 constructions, key by key where they speak of keys.
#pragma once

#include <cstdint>
#include <vector>

#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference::test {

// What a rule keeps of one query head, in blocks of `size` rows of the chunk and `size` keys.
struct ExpectedBlocks {
  std::int64_t size = 0;
  std::vector<std::vector<bool>> kept;  // [row blocks][key blocks]
  // How clearly the closest decision about a row block was taken, relative to what was compared.
  std::vector<double> margin;  // [row blocks]
};

ExpectedBlocks block_sparse_rule(const AttentionInput& input, const AttentionParams& params,
                                 std::int64_t b, std::int64_t h, std::int64_t top_k);

struct XAttentionRule {
  std::int64_t block_size = 128;
  std::int64_t stride = 8;
  double threshold = 0.9;
  double norm = 1;
};
ExpectedBlocks xattention_rule(const AttentionInput& input, const AttentionParams& params,
                               std::int64_t b, std::int64_t h, const XAttentionRule& rule);

struct FlexPrefillRule {
  std::int64_t block_size = 128;
  double gamma = 0.9;
  double tau = 0.1;
  std::int64_t min_budget = 0;
  std::int64_t max_budget = 0;
};
ExpectedBlocks flexprefill_rule(const AttentionInput& input, const AttentionParams& params,
                                std::int64_t b, std::int64_t h, const FlexPrefillRule& rule);

struct InfLlmRule {
  std::int64_t n_init = 128;
  std::int64_t n_local = 4096;
  std::int64_t topk = 16;
  std::int64_t repr_topk = 4;
  std::int64_t block_size = 128;
  std::int64_t exc_block_size = 512;
};
ExpectedBlocks inf_llm_rule(const AttentionInput& input, const AttentionParams& params,
                            std::int64_t b, std::int64_t h, const InfLlmRule& rule);

// Expects that the head keeps what the rule says of each row block whose margin exceeds `tolerance`,
// as far as a row may see it, and nothing else. Returns the share of row blocks that were compared.
double expect_kept(const HeadIndex& head, const ExpectedBlocks& expected,
                   const AttentionInput& input, const AttentionParams& params, std::int64_t b,
                   double tolerance);

}  // namespace minference::test

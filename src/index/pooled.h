// PooledKeys: mean-pooled key blocks of every KV head, and their products with mean-pooled queries.
//
// Always in f32: pooling divides the cost by the block size twice, and means of many rows lie close
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/cpu/kernel_table.h"
#include "core/aligned_buffer.h"
#include "minference/attention.h"

namespace minference {

class PooledKeys {
 public:
  // Pools, with all threads, blocks of `block_size` keys of the KV heads that a query head in
  // `wanted` [batch * q_heads] reads. Keeps references to its arguments.
  PooledKeys(const AttentionInput& input, const AttentionParams& params, std::int64_t block_size,
             std::span<const std::uint8_t> wanted);

  // One thread's memory for scores(), reused from call to call.
  class Scratch {
    friend class PooledKeys;
    AlignedBuffer<float> means;  // [kTileRows][dim]
    AlignedBuffer<std::byte> queries;
    AlignedBuffer<float> scores;  // [kTileRows][stride]
  };

  // Scores of up to 64 groups of query rows of head h, each the mean of `group_rows` rows from
  // first_row on (fewer at end_row), against the means of the first `key_blocks` key blocks: scale
  // and soft cap applied, no mask. The rows of the result lie `stride` apart.
  struct Scores {
    const float* data = nullptr;
    std::int64_t stride = 0;
    std::int64_t groups = 0;

    const float* row(std::int64_t group) const { return data + group * stride; }
  };
  Scores scores(std::int64_t b, std::int64_t h, std::int64_t first_row, std::int64_t end_row,
                std::int64_t group_rows, std::int64_t key_blocks, Scratch& scratch) const;

 private:
  struct Head {
    std::int64_t key_blocks = 0;
    AlignedBuffer<std::byte> packed;  // [tiles of kTileKeys blocks], packed by pack_keys()
  };

  void pool(std::int64_t b, std::int64_t kv_head, std::int64_t tile);

  const AttentionInput& input_;
  const AttentionParams& params_;
  const cpu::KernelTable& kernels_;
  std::int64_t block_size_;
  std::int64_t dim_;         // padded
  std::vector<Head> heads_;  // [batch][kv_heads]
};

}  // namespace minference

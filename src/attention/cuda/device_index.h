// DeviceIndex: a SparseIndex in device memory, built there or copied from the host.
//
// Counts lie on the device, capacities are known to the host: an index can be built and used in one
// stream without the host ever reading it.
#pragma once

#include <cstdint>

#include "minference/sparse_index.h"

namespace minference::cuda {

struct DeviceRun {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t stride = 1;
  std::int32_t unused = 0;  // 16 bytes: one load
};

// HeadIndex in device terms. The *_begin fields are places in the arrays of DeviceIndex.
struct DeviceHead {
  HeadIndex::Kind kind = HeadIndex::Kind::kDense;
  RunRounding rounding = RunRounding::kBox;
  std::int32_t dense_last_rows = 0;
  std::int32_t run_count = 0;
  std::int32_t column_count = 0;
  std::int64_t run_begin = 0;
  std::int64_t column_begin = 0;  // a multiple of kBoxKeys
  std::int64_t block_row_begin = 0;
  std::int64_t block_id_begin = 0;
  // Block form: 0, or rows and keys of a block where the key blocks are bits rather than a list. Then
  // block_id_begin is a place in block_bits.
  std::int32_t bit_block_size = 0;
  std::int32_t bit_words = 0;  // of a row block
};

struct DeviceIndex {
  const DeviceHead* heads = nullptr;      // [batch][q_heads]; null: every head is dense
  const DeviceRun* runs = nullptr;        // ascending, disjoint within a head
  const std::int32_t* columns = nullptr;  // ascending within a head
  // Row block m of a head sees block_ids[block_id_begin + block_rows[block_row_begin + m] ...
  // block_id_begin + block_rows[block_row_begin + m + 1]), ascending.
  const std::int32_t* block_rows = nullptr;
  const std::int32_t* block_ids = nullptr;
  // The same as bits, for heads that may keep many blocks: block n of row block m of a head is bit n % 32
  // of block_bits[block_id_begin + m * bit_words + n / 32]. Bits of blocks that a row block does not see mean
  // nothing.
  const std::uint32_t* block_bits = nullptr;
  // Entries that `columns` has room for, over all heads: rows of the gathered keys and values.
  std::int64_t column_capacity = 0;
  // Dense heads are worth a kernel of their own, where the executor has one: there may be many.
  bool dense_apart = false;
  // No head has runs, columns or lists, and blocks are of whole tiles of rows: what one row of a tile
  // may see, all may, and boxes come in pairs.
  bool block_pairs = false;
};

}  // namespace minference::cuda

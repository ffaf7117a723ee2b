// HostIndex: a SparseIndex laid out as DeviceIndex is, still in the host's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/cuda/device_index.h"
#include "minference/sparse_index.h"

namespace minference::cuda {

// Positions on the device are below this.
inline constexpr std::int64_t kMaxPosition = std::int64_t{1} << 30;

struct HostIndex {
  std::vector<DeviceHead> heads;
  std::vector<DeviceRun> runs;
  std::vector<std::int32_t> columns;
  std::vector<std::int32_t> block_rows;
  std::vector<std::int32_t> block_ids;

  // Of a validated index for sequences of at most `q_tokens` rows. Throws InvalidArgument where a
  // head's blocks do not fit 32 bits.
  HostIndex(const SparseIndex& index, std::int64_t q_tokens);
};

}  // namespace minference::cuda

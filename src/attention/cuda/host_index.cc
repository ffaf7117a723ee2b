#include "attention/cuda/host_index.h"

#include <algorithm>
#include <limits>
#include <string>

#include "attention/cuda/problem.h"
#include "minference/error.h"

namespace minference::cuda {

HostIndex::HostIndex(const SparseIndex& index, std::int64_t q_tokens) {
  for (const HeadIndex& from : index.heads) {
    DeviceHead head;
    head.kind = from.kind;
    head.rounding = from.rounding;
    head.dense_last_rows = static_cast<std::int32_t>(std::min(from.dense_last_rows, q_tokens));
    head.run_begin = static_cast<std::int64_t>(runs.size());
    head.column_begin = static_cast<std::int64_t>(columns.size());
    head.block_row_begin = static_cast<std::int64_t>(block_rows.size());
    head.block_id_begin = static_cast<std::int64_t>(block_ids.size());
    for (const OffsetRun& run : from.runs) {
      if (run.begin >= kMaxPosition) break;
      runs.push_back({static_cast<std::int32_t>(run.begin),
                      static_cast<std::int32_t>(std::min(run.end, kMaxPosition)),
                      static_cast<std::int32_t>(std::min(run.stride, kMaxPosition))});
    }
    head.run_count = static_cast<std::int32_t>(std::ssize(runs) - head.run_begin);
    columns.insert(columns.end(), from.columns.begin(), from.columns.end());
    head.column_count = static_cast<std::int32_t>(from.columns.size());
    columns.resize((columns.size() + kBoxKeys - 1) / kBoxKeys * kBoxKeys);
    if (std::ssize(from.block_ids) > std::numeric_limits<std::int32_t>::max()) {
      throw InvalidArgument("a head of the index has " + std::to_string(from.block_ids.size()) +
                            " blocks; legal on a CUDA device: up to 2147483647");
    }
    block_rows.insert(block_rows.end(), from.block_begin.begin(), from.block_begin.end());
    block_ids.insert(block_ids.end(), from.block_ids.begin(), from.block_ids.end());
    heads.push_back(head);
  }
}

}  // namespace minference::cuda

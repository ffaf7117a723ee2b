#include "index/cuda/head_plan.h"

#include <algorithm>
#include <string>

#include "attention/cuda/send.h"
#include "minference/error.h"

namespace minference::cuda {

void add_block_head(const Problem& problem, std::int64_t blocks, HeadPlan& plan,
                    IndexArrays& arrays) {
  constexpr std::int64_t kMostIds = INT32_MAX;
  const std::int64_t row_blocks = (problem.q_tokens + kRowBlock - 1) / kRowBlock;
  const std::int64_t key_blocks = (problem.kv_tokens + kKeyBlock - 1) / kKeyBlock;
  const std::int64_t ids = checked_mul(row_blocks, std::min(blocks, key_blocks), "a block index");
  if (ids > kMostIds) {
    throw InvalidArgument("a head of the block form may have to keep " + std::to_string(ids) +
                          " blocks; legal: up to " + std::to_string(kMostIds));
  }
  plan.block_ids = static_cast<std::int32_t>(ids);
  plan.block_row_begin = arrays.block_rows_of_sequence;
  plan.block_id_begin = arrays.block_ids_of_sequence;
  arrays.block_rows_of_sequence += row_blocks + 1;
  arrays.block_ids_of_sequence += ids;
}

void allocate(const Problem& problem, MemoryPieces& workspace, IndexArrays& arrays) {
  const auto take = [&]<class T>(T*& array, std::int64_t of_sequence) {
    array = workspace.take<T>(checked_mul(of_sequence, problem.batch, "an index"));
  };
  take(arrays.heads, problem.q_heads);
  take(arrays.columns, arrays.columns_of_sequence);
  take(arrays.runs, arrays.runs_of_sequence);
  take(arrays.lists, arrays.lists_of_sequence);
  take(arrays.block_rows, arrays.block_rows_of_sequence);
  take(arrays.block_ids, arrays.block_ids_of_sequence);
  arrays.plans = workspace.take<HeadPlan>(problem.q_heads);
}

void upload_plans(const std::vector<HeadPlan>& plans, HeadPlan* to, cudaStream_t stream) {
  static_assert(sizeof(HeadPlan) % 4 == 0);
  send(plans.data(), static_cast<std::int64_t>(plans.size() * sizeof(HeadPlan)), to, stream);
}

}  // namespace minference::cuda

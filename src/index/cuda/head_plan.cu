#include "index/cuda/head_plan.h"

#include <algorithm>
#include <string>

#include "attention/cuda/check.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

struct SomePlans {
  static constexpr int kMany = 48;  // of the 4 KiB that parameters may take
  HeadPlan plans[kMany];
};

__global__ void write_plans(const __grid_constant__ SomePlans some, HeadPlan* to, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) to[i] = some.plans[i];
}

}  // namespace

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
  const int all = static_cast<int>(plans.size());
  for (int first = 0; first < all; first += SomePlans::kMany) {
    SomePlans some;
    const int count = std::min(SomePlans::kMany, all - first);
    std::copy_n(plans.begin() + first, count, some.plans);
    write_plans<<<1, SomePlans::kMany, 0, stream>>>(some, to + first, count);
    check(cudaGetLastError(), "sending the plans of an index");
  }
}

}  // namespace minference::cuda

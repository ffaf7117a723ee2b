#include "index/cuda/check_problem.h"

#include <string>

#include "attention/cuda/host_index.h"
#include "core/format_number.h"
#include "index/cuda/memory_pieces.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

void check_range(const char* what, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw InvalidArgument(std::string(what) + " is " + std::to_string(value) +
                        "; legal: " + std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

void check_problem(const Problem& problem) {
  constexpr std::int64_t kMostTokens = kMaxPosition - 1;
  constexpr std::int64_t kMostHeads = 1 << 16;
  constexpr std::int64_t kMostDim = 256;
  constexpr int kDimStep = 8;
  check_range("the batch", problem.batch, 1, kMostHeads);
  check_range("the number of query heads", problem.q_heads, 1, kMostHeads);
  check_range("the number of KV heads", problem.kv_heads, 1, problem.q_heads);
  if (problem.q_heads != problem.kv_heads * problem.group) {
    throw InvalidArgument("there are " + std::to_string(problem.q_heads) +
                          " query heads; legal: a multiple of the " +
                          std::to_string(problem.kv_heads) + " KV heads, " +
                          std::to_string(problem.group) + " times as many");
  }
  check_range("the number of query tokens", problem.q_tokens, 1, kMostTokens);
  check_range("the number of keys", problem.kv_tokens, 1, kMostTokens);
  check_range("the head dim", problem.dim, kDimStep, kMostDim);
  if (problem.dim % kDimStep != 0) {
    throw Unsupported("the head dim is " + std::to_string(problem.dim) +
                      "; legal for an estimate on a CUDA device: multiples of " +
                      std::to_string(kDimStep));
  }
  if (problem.q.dtype != problem.k.dtype) {
    throw Unsupported(std::string("queries are ") + dtype_name(problem.q.dtype) + " and keys are " +
                      dtype_name(problem.k.dtype) +
                      "; legal for an estimate on a CUDA device: one type for both");
  }
  if (problem.block_table != nullptr) {
    check_range("the page size", problem.page_size, 1, kMostTokens);
  }
}

void check_block_size(std::int64_t block_size) {
  constexpr std::int64_t kMostSize = 1024;
  check_range("the block size", block_size, kRowBlock, kMostSize);
  if (block_size % kRowBlock != 0) {
    throw InvalidArgument("the block size is " + std::to_string(block_size) +
                          "; legal: multiples of " + std::to_string(kRowBlock));
  }
}

void check_share(const char* what, double share) {
  if (share >= 0 && share <= 1) return;
  throw InvalidArgument(std::string(what) + " is " + format_number(share) + "; legal: 0 to 1");
}

void check_workspace(const IndexWorkspace& workspace, std::int64_t needed) {
  if (workspace.data == nullptr || workspace.bytes < needed) {
    throw InvalidArgument("the workspace has " + std::to_string(workspace.bytes) +
                          " bytes; legal: " + std::to_string(needed) + " or more");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % MemoryPieces::kAlignment != 0) {
    throw InvalidArgument("the workspace is not aligned; legal: addresses that are multiples of " +
                          std::to_string(MemoryPieces::kAlignment));
  }
}

}  // namespace minference::cuda

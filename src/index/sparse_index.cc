#include "minference/sparse_index.h"

#include <algorithm>
#include <string>

#include "core/checked.h"
#include "minference/error.h"

namespace minference {
namespace {

// Far beyond any text, and small enough that positions plus or minus an offset never wrap.
constexpr std::int64_t kMaxOffset = std::int64_t{1} << 62;

// Prefix of every message: which head is wrong.
std::string head_name(std::int64_t b, std::int64_t h) {
  return "index of sequence " + std::to_string(b) + ", query head " + std::to_string(h) + ": ";
}

std::string run_name(const OffsetRun& run) {
  return "[" + std::to_string(run.begin) + ", " + std::to_string(run.end) + ") stride " +
         std::to_string(run.stride);
}

void validate_columns(const HeadIndex& head, std::int64_t kv_tokens, const std::string& where) {
  std::int64_t previous = -1;
  for (const std::int64_t column : head.columns) {
    if (column < 0 || column >= kv_tokens) {
      throw InvalidArgument(where + "column is " + std::to_string(column) + "; legal: 0 to " +
                            std::to_string(kv_tokens - 1));
    }
    if (column <= previous) {
      throw InvalidArgument(where + "column " + std::to_string(column) + " follows " +
                            std::to_string(previous) + "; columns must strictly ascend");
    }
    previous = column;
  }
}

void validate_runs(const HeadIndex& head, const std::string& where) {
  std::int64_t previous_end = 0;
  for (const OffsetRun& run : head.runs) {
    if (run.begin < 0 || run.end <= run.begin || run.end > kMaxOffset) {
      throw InvalidArgument(where + "run is " + run_name(run) +
                            "; legal: 0 <= begin < end <= 2^62");
    }
    if (run.stride < 1) {
      throw InvalidArgument(where + "run is " + run_name(run) + "; legal strides: 1 or more");
    }
    if (run.stride != 1 && head.rounding != RunRounding::kNone) {
      throw InvalidArgument(where + "run is " + run_name(run) +
                            "; the stride must be 1 where runs are rounded");
    }
    if (run.begin < previous_end) {
      throw InvalidArgument(where + "run " + run_name(run) + " begins before " +
                            std::to_string(previous_end) +
                            ", the end of the one before; runs must ascend without overlap");
    }
    previous_end = run.end;
  }
}

void validate_blocks(const HeadIndex& head, std::int64_t row_blocks, std::int64_t key_blocks,
                     const std::string& where) {
  const auto size = static_cast<std::int64_t>(head.block_begin.size());
  if (size != row_blocks + 1) {
    throw InvalidArgument(where + "block_begin has " + std::to_string(size) +
                          " entries; legal: row blocks + 1 = " + std::to_string(row_blocks + 1));
  }
  const auto ids = static_cast<std::int64_t>(head.block_ids.size());
  if (head.block_begin.front() != 0 || head.block_begin.back() != ids) {
    throw InvalidArgument(where + "block_begin goes from " +
                          std::to_string(head.block_begin.front()) + " to " +
                          std::to_string(head.block_begin.back()) + "; legal: from 0 to " +
                          std::to_string(ids) + ", the number of block ids");
  }
  // All the bounds first: the ids may be read only once every range is known to lie inside.
  for (std::int64_t m = 0; m < row_blocks; ++m) {
    if (head.block_begin[m] > head.block_begin[m + 1]) {
      throw InvalidArgument(where + "block_begin falls from " +
                            std::to_string(head.block_begin[m]) + " to " +
                            std::to_string(head.block_begin[m + 1]) + " at row block " +
                            std::to_string(m) + "; it must not fall");
    }
  }
  for (std::int64_t m = 0; m < row_blocks; ++m) {
    std::int64_t previous = -1;
    for (std::int64_t i = head.block_begin[m]; i < head.block_begin[m + 1]; ++i) {
      const std::int64_t id = head.block_ids[i];
      if (id < 0 || id >= key_blocks) {
        throw InvalidArgument(where + "block id is " + std::to_string(id) + " in row block " +
                              std::to_string(m) + "; legal: 0 to " +
                              std::to_string(key_blocks - 1));
      }
      if (id <= previous) {
        throw InvalidArgument(where + "block id " + std::to_string(id) + " follows " +
                              std::to_string(previous) + " in row block " + std::to_string(m) +
                              "; ids must strictly ascend");
      }
      previous = id;
    }
  }
}

}  // namespace

std::vector<OffsetRun> merge_runs(std::vector<OffsetRun> runs, std::int64_t max_gap) {
  if (max_gap < 0) {
    throw InvalidArgument("max_gap is " + std::to_string(max_gap) + "; legal: 0 or more");
  }
  for (const OffsetRun& run : runs) {
    if (run.stride != 1) {
      throw InvalidArgument("cannot merge run " + run_name(run) + "; the stride must be 1");
    }
  }
  std::erase_if(runs, [](const OffsetRun& run) { return run.begin >= run.end; });
  std::sort(runs.begin(), runs.end(),
            [](const OffsetRun& a, const OffsetRun& b) { return a.begin < b.begin; });
  std::vector<OffsetRun> merged;
  for (const OffsetRun& run : runs) {
    // Where the difference would wrap the gap is larger than any max_gap, or there is none.
    std::int64_t gap = 0;
    const bool joins =
        !merged.empty() &&
        (run.begin <= merged.back().end ||
         (!__builtin_sub_overflow(run.begin, merged.back().end, &gap) && gap <= max_gap));
    if (joins) {
      merged.back().end = std::max(merged.back().end, run.end);
    } else {
      merged.push_back(run);
    }
  }
  return merged;
}

void validate(const SparseIndex& index, std::int64_t batch, std::int64_t q_heads,
              std::int64_t q_tokens, std::int64_t kv_tokens) {
  if (index.batch != batch || index.q_heads != q_heads) {
    throw InvalidArgument("the index is for " + std::to_string(index.batch) + " sequences of " +
                          std::to_string(index.q_heads) + " query heads; the input has " +
                          std::to_string(batch) + " of " + std::to_string(q_heads));
  }
  const std::int64_t expected = checked_mul(batch, q_heads, "the number of heads of an index");
  if (static_cast<std::int64_t>(index.heads.size()) != expected) {
    throw InvalidArgument("the index holds " + std::to_string(index.heads.size()) +
                          " heads; legal: batch * query heads = " + std::to_string(expected));
  }
  const std::int64_t row_blocks = q_tokens / kRowBlock + (q_tokens % kRowBlock != 0 ? 1 : 0);
  const std::int64_t key_blocks = kv_tokens / kKeyBlock + (kv_tokens % kKeyBlock != 0 ? 1 : 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < q_heads; ++h) {
      const HeadIndex& head = index.head(b, h);
      const std::string where = head_name(b, h);
      if (head.dense_last_rows < 0) {
        throw InvalidArgument(where + "dense_last_rows is " + std::to_string(head.dense_last_rows) +
                              "; legal: 0 or more");
      }
      switch (head.kind) {
        case HeadIndex::Kind::kDense:
          break;
        case HeadIndex::Kind::kDiagonal:
          validate_columns(head, kv_tokens, where);
          validate_runs(head, where);
          break;
        case HeadIndex::Kind::kBlock:
          validate_blocks(head, row_blocks, key_blocks, where);
          break;
        default:
          throw InvalidArgument(where + "kind is " + std::to_string(static_cast<int>(head.kind)) +
                                "; legal: dense (0), diagonal (1), block (2)");
      }
    }
  }
}

}  // namespace minference

#include "index/block_relevance.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "attention/cpu/kernel_table.h"
#include "attention/cpu/row_source.h"
#include "attention/score.h"
#include "core/aligned_buffer.h"
#include "core/parallel.h"
#include "index/mean_rows.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// Key blocks that one task rates: enough that the threads rarely meet, few enough that a single
// head keeps them all busy.
constexpr std::int64_t kTaskBlocks = 16;

// Mean of the `count` highest of values[0 ... n), which are reordered. NaN is lower than all else.
float mean_of_highest(float* values, std::int64_t n, std::int64_t count) {
  count = std::min(count, n);
  for (std::int64_t i = 0; i < n; ++i) {
    if (values[i] != values[i]) values[i] = -std::numeric_limits<float>::infinity();
  }
  std::nth_element(values, values + (count - 1), values + n, std::greater<>());
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return static_cast<float>(sum / static_cast<double>(count));
}

// One thread's memory.
struct Worker {
  AlignedBuffer<std::byte> keys;  // one packed block
  AlignedBuffer<float> scores;    // [kTileRows][block_size]
  AlignedBuffer<float> means;     // [kTileRows][dim]
  std::vector<const void*> rows;
};

class Estimator {
 public:
  Estimator(const AttentionInput& input, const AttentionParams& params,
            const BlockRelevanceOptions& options, std::span<const BlockGrid::Range> blocks)
      : input_(input),
        params_(params),
        options_(options),
        blocks_(blocks),
        kernels_(*kernel_table(choose_isa(false))),
        group_(input.q.heads() / input.k.heads()),
        dim_(round_up(input.q.dim(), kernels_.dim_align)),
        workers_(resolve_threads(params.threads)),
        queries_(input.q.batch() * input.k.heads()),
        result_(input.q.batch() * input.q.heads()) {}

  std::vector<BlockRelevance> run() {
    struct Task {
      std::int64_t b;
      std::int64_t kv_head;
      std::int64_t begin;  // query tile, or key block
      std::int64_t end;
    };
    std::vector<Task> query_tasks;
    std::vector<Task> key_tasks;
    for (std::int64_t b = 0; b < input_.q.batch(); ++b) {
      const BlockGrid::Range range = blocks_[b];
      if (range.size() <= 0) continue;
      for (std::int64_t h = 0; h < input_.q.heads(); ++h) {
        BlockRelevance& head = result_[b * input_.q.heads() + h];
        head.blocks = range;
        head.values.resize(groups(b) * range.size());
      }
      for (std::int64_t kv_head = 0; kv_head < input_.k.heads(); ++kv_head) {
        queries_[b * input_.k.heads() + kv_head] =
            AlignedBuffer<std::byte>(tiles(b) * tile_bytes());
        for (std::int64_t tile = 0; tile < tiles(b); ++tile) {
          query_tasks.push_back({b, kv_head, tile, tile + 1});
        }
        for (std::int64_t n = range.begin; n < range.end; n += kTaskBlocks) {
          key_tasks.push_back({b, kv_head, n, std::min(n + kTaskBlocks, range.end)});
        }
      }
    }
    const auto for_each = [&](const std::vector<Task>& tasks, auto&& body) {
      parallel_for(static_cast<std::int64_t>(tasks.size()), params_.threads,
                   [&](std::int64_t i, int thread) { body(tasks[i], workers_[thread]); });
    };
    for_each(query_tasks, [&](const Task& task, Worker& worker) {
      load_queries(task.b, task.kv_head, task.begin, worker);
    });
    for_each(key_tasks, [&](const Task& task, Worker& worker) {
      kernels_.enter();
      for (std::int64_t n = task.begin; n < task.end; ++n) rate(task.b, task.kv_head, n, worker);
      kernels_.leave();
    });
    return std::move(result_);
  }

 private:
  std::int64_t q_len(std::int64_t b) const { return SequenceGeometry(input_, params_, b).q_len; }
  std::int64_t groups(std::int64_t b) const {
    return (q_len(b) + options_.group_rows - 1) / options_.group_rows;
  }
  // Mean queries of all heads that read a KV head, group after group: entry i is of head
  // i % group_ of these and of row group i / group_.
  std::int64_t entries(std::int64_t b) const { return groups(b) * group_; }
  std::int64_t tiles(std::int64_t b) const { return (entries(b) + kTileRows - 1) / kTileRows; }
  std::int64_t tile_bytes() const { return kTileRows * dim_ * kernels_.element_size; }

  void load_queries(std::int64_t b, std::int64_t kv_head, std::int64_t tile, Worker& worker) {
    const std::int64_t dim = input_.q.dim();
    if (worker.means.size() == 0) worker.means = AlignedBuffer<float>(kTileRows * dim);
    const std::int64_t first = tile * kTileRows;
    const std::int64_t count = std::min(kTileRows, entries(b) - first);
    const void* addresses[kTileRows];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = (first + i) / group_ * options_.group_rows;
      const std::int64_t h = kv_head * group_ + (first + i) % group_;
      float* mean = worker.means.data() + i * dim;
      mean_rows(
          kernels_, std::min(options_.group_rows, q_len(b) - row), input_.q.dtype, dim, worker.rows,
          [&](std::int64_t j) { return input_.q.row(b, row + j, h); }, mean);
      addresses[i] = mean;
    }
    kernels_.load_queries(addresses, DType::kF32, count, dim, dim_,
                          queries_[b * input_.k.heads() + kv_head].data() + tile * tile_bytes());
  }

  void rate(std::int64_t b, std::int64_t kv_head, std::int64_t n, Worker& worker) {
    const std::int64_t size = options_.block_size;
    const std::int64_t packed_tile = kTileKeys * dim_ * kernels_.element_size;
    if (worker.keys.size() == 0) {
      worker.keys = AlignedBuffer<std::byte>(size / kTileKeys * packed_tile);
      worker.scores = AlignedBuffer<float>(kTileRows * size);
    }
    const RowSource source(input_, input_.k, b, kv_head);
    const void* rows[kTileKeys];
    for (std::int64_t key = 0; key < size; key += kTileKeys) {
      source.rows(n * size + key, kTileKeys, rows);
      kernels_.pack_keys(rows, input_.k.dtype, kTileKeys, input_.k.dim(), dim_,
                         worker.keys.data() + key / kTileKeys * packed_tile);
    }
    const float scale = score_scale(input_, params_);
    const std::byte* queries = queries_[b * input_.k.heads() + kv_head].data();
    for (std::int64_t tile = 0; tile < tiles(b); ++tile) {
      const std::int64_t first = tile * kTileRows;
      const std::int64_t count = std::min(kTileRows, entries(b) - first);
      const void* keys = worker.keys.data();
      kernels_.gemm(queries + tile * tile_bytes(), 0, count, &keys, 1, dim_, size / kPanelWidth,
                    worker.scores.data(), size, false);
      for (std::int64_t i = 0; i < count; ++i) {
        float* scores = worker.scores.data() + i * size;
        for (std::int64_t key = 0; key < size; ++key) {
          scores[key] = soft_capped(scale * scores[key], params_.soft_cap);
        }
        BlockRelevance& head =
            result_[b * input_.q.heads() + kv_head * group_ + (first + i) % group_];
        head.values[(first + i) / group_ * head.blocks.size() + n - head.blocks.begin] =
            mean_of_highest(scores, size, options_.representatives);
      }
    }
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const BlockRelevanceOptions& options_;
  std::span<const BlockGrid::Range> blocks_;
  const KernelTable& kernels_;
  std::int64_t group_;  // query heads per KV head
  std::int64_t dim_;    // padded
  std::vector<Worker> workers_;
  std::vector<AlignedBuffer<std::byte>> queries_;  // [batch][kv_heads], packed
  std::vector<BlockRelevance> result_;
};

}  // namespace

std::vector<BlockRelevance> block_relevance(const AttentionInput& input,
                                            const AttentionParams& params,
                                            const BlockRelevanceOptions& options,
                                            std::span<const BlockGrid::Range> blocks) {
  return Estimator(input, params, options, blocks).run();
}

}  // namespace minference

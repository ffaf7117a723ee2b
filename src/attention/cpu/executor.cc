#include "attention/cpu/executor.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numbers>

#include "attention/cpu/kernel_table.h"
#include "attention/cpu/non_finite_values.h"
#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/visible_keys.h"
#include "core/float16.h"
#include "core/parallel.h"
#include "core/stopwatch.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): the executor is its front

// Packed K/V may take this much at a time; more heads than fit are done in waves.
constexpr std::int64_t kPackBudgetBytes = std::int64_t{1} << 30;

// Dense query heads of a KV head that one task takes through the same keys, so that a batch of keys
// is fetched into the first-level caches once for all of them.
constexpr std::int64_t kMaxSharingHeads = 4;
// But not when that leaves a thread fewer tasks than this.
constexpr std::int64_t kMinTasksPerThread = 8;

// Keys and values of one KV head, or the gathered columns of one query head, in tile layout.
struct Packed {
  AlignedBuffer<std::byte> keys;
  AlignedBuffer<std::byte> values;
};

// One unit of packing: up to 64 tokens of a KV head, or 64 columns of a query head.
struct PackTask {
  Packed* to;
  std::int64_t b;
  std::int64_t kv_head;
  const std::int64_t* columns;  // null: tokens begin ... begin + count
  std::int64_t begin;
  std::int64_t count;
};

struct RowTask {
  std::int64_t b;
  std::int64_t h;      // the first of
  std::int64_t heads;  // which all see the same keys
  std::int64_t row_begin;
  std::int64_t row_end;
  std::int64_t cost;  // keys to visit by all heads, roughly
};

class Execution {
 public:
  Execution(const AttentionInput& input, const AttentionParams& params,
            const AttentionOutput& output, const SparseIndex* index, const KernelTable& kernels)
      : input_(input),
        params_(params),
        output_(output),
        index_(index),
        kernels_(kernels),
        group_(input.q.heads() / input.k.heads()),
        dim_(round_up(input.q.dim(), kernels.dim_align)),
        v_dim_(round_up(input.v.dim(), kValueAlign)) {
    for (std::int64_t b = 0; b < input.q.batch(); ++b) geometry_.emplace_back(input, params, b);
    scratch_.resize(resolve_threads(params.threads));
    kept_.resize(scratch_.size());
  }

  void run(Stats& stats) {
    const std::int64_t sequences = input_.q.batch();
    std::int64_t heads_bytes = 0;
    std::vector<std::pair<std::int64_t, std::int64_t>> wave;
    for (std::int64_t b = 0; b < sequences; ++b) {
      const std::int64_t bytes =
          round_up(geometry_[b].kv_len, kTileKeys) * (dim_ + v_dim_) * kernels_.element_size;
      for (std::int64_t kv_head = 0; kv_head < input_.k.heads(); ++kv_head) {
        if (!wave.empty() && heads_bytes + bytes > kPackBudgetBytes) {
          run_wave(wave);
          wave.clear();
          heads_bytes = 0;
        }
        wave.emplace_back(b, kv_head);
        heads_bytes += bytes;
      }
    }
    run_wave(wave);
    for (const std::int64_t pairs : kept_) stats.kept_pairs += pairs;
    for (const SequenceGeometry& geometry : geometry_) {
      stats.causal_pairs += geometry.pairs() * input_.q.heads();
    }
  }

 private:
  using Wave = std::vector<std::pair<std::int64_t, std::int64_t>>;  // (sequence, KV head)

  Packed allocate(std::int64_t keys) const {
    keys = round_up(keys, kTileKeys);
    return {AlignedBuffer<std::byte>(keys * dim_ * kernels_.element_size),
            AlignedBuffer<std::byte>(keys * v_dim_ * kernels_.element_size)};
  }

  void run_wave(const Wave& wave) {
    std::vector<Packed> packed(wave.size());            // [wave]
    std::vector<Packed> columns(wave.size() * group_);  // [wave][group]
    std::vector<PackTask> pack_tasks;
    std::vector<RowTask> row_tasks;
    const std::int64_t sharing = sharing_heads(wave);
    for (std::size_t w = 0; w < wave.size(); ++w) {
      const auto [b, kv_head] = wave[w];
      const std::int64_t kv_len = geometry_[b].kv_len;
      packed[w] = allocate(kv_len);
      std::vector<std::uint8_t> needed(kv_len / kTileKeys + 1, 0);
      std::int64_t dense_heads = 0;  // in a row, up to h
      for (std::int64_t g = 0; g < group_; ++g) {
        const std::int64_t h = kv_head * group_ + g;
        const HeadIndex* head = sparse_head(index_, b, h);
        mark_needed_keys(geometry_[b], head, needed);
        if (head != nullptr && !head->columns.empty()) {
          // Columns at and beyond this sequence's length do not exist.
          const std::int64_t count =
              std::lower_bound(head->columns.begin(), head->columns.end(), kv_len) -
              head->columns.begin();
          Packed& to = columns[w * group_ + g] = allocate(count);
          for (std::int64_t c = 0; c < count; c += kTileKeys) {
            pack_tasks.push_back(
                {&to, b, kv_head, head->columns.data(), c, std::min(kTileKeys, count - c)});
          }
        }
        if (head != nullptr) {
          add_row_tasks(b, h, 1, head, row_tasks);
        } else if (++dense_heads == sharing || g + 1 == group_ ||
                   sparse_head(index_, b, h + 1) != nullptr) {
          add_row_tasks(b, h + 1 - dense_heads, dense_heads, nullptr, row_tasks);
          dense_heads = 0;
        }
      }
      for (std::int64_t key = 0; key < kv_len; key += kTileKeys) {
        if (needed[key / kTileKeys] != 0) {
          pack_tasks.push_back(
              {&packed[w], b, kv_head, nullptr, key, std::min(kTileKeys, kv_len - key)});
        }
      }
    }
    parallel_for(static_cast<std::int64_t>(pack_tasks.size()), params_.threads,
                 [&](std::int64_t i, int) { pack(pack_tasks[i]); });

    // Longest first, so that threads finish together; equals stay in KV-head order, which keeps the
    // packed keys of a group in cache.
    std::stable_sort(row_tasks.begin(), row_tasks.end(),
                     [](const RowTask& a, const RowTask& b) { return a.cost > b.cost; });
    const std::int64_t first_head =
        wave.empty() ? 0 : wave.front().first * input_.k.heads() + wave.front().second;
    parallel_for(static_cast<std::int64_t>(row_tasks.size()), params_.threads,
                 [&](std::int64_t i, int thread) {
                   const RowTask& task = row_tasks[i];
                   const std::int64_t w = task.b * input_.k.heads() + task.h / group_ - first_head;
                   attend(task, packed[w], columns[w * group_ + task.h % group_], thread);
                 });
  }

  // Heads that a task of dense heads takes.
  std::int64_t sharing_heads(const Wave& wave) const {
    std::int64_t tasks = 0;
    for (const auto& [b, kv_head] : wave) {
      tasks += group_ * ((geometry_[b].q_len + kRowBlock - 1) / kRowBlock);
    }
    const auto threads = static_cast<std::int64_t>(scratch_.size());
    return std::clamp<std::int64_t>(tasks / (kMinTasksPerThread * threads), 1, kMaxSharingHeads);
  }

  void add_row_tasks(std::int64_t b, std::int64_t h, std::int64_t heads, const HeadIndex* head,
                     std::vector<RowTask>& tasks) const {
    const SequenceGeometry& geometry = geometry_[b];
    std::int64_t run_keys = 0;
    if (head != nullptr) {
      run_keys = static_cast<std::int64_t>(head->columns.size());
      for (const OffsetRun& run : head->runs) run_keys += run.end - run.begin + kRowBlock;
    }
    const std::int64_t dense_from =
        head == nullptr ? 0 : std::max<std::int64_t>(geometry.q_len - head->dense_last_rows, 0);
    for (std::int64_t row = 0; row < geometry.q_len;) {
      std::int64_t end = std::min((row / kRowBlock + 1) * kRowBlock, geometry.q_len);
      const bool sparse = head != nullptr && row < dense_from;
      if (sparse) end = std::min(end, dense_from);
      std::int64_t cost = geometry.end_key(end - 1) - geometry.first_key(row);
      if (sparse && head->kind == HeadIndex::Kind::kDiagonal) cost = std::min(cost, run_keys);
      if (sparse && head->kind == HeadIndex::Kind::kBlock) {
        const std::int64_t block = row / kRowBlock;
        cost = (head->block_begin[block + 1] - head->block_begin[block]) * kKeyBlock;
      }
      tasks.push_back({b, h, heads, row, end, cost * heads});
      row = end;
    }
  }

  void pack(const PackTask& task) const {
    const std::int64_t key_bytes = dim_ * kernels_.element_size;
    const std::int64_t value_bytes = v_dim_ * kernels_.element_size;
    const void* keys[kTileKeys];
    const void* values[kTileKeys];
    const auto addresses = [&](const TensorView& tensor, const void** rows) {
      const RowSource source(input_, tensor, task.b, task.kv_head);
      if (task.columns != nullptr) {
        source.gather(task.columns + task.begin, task.count, rows);
      } else {
        source.rows(task.begin, task.count, rows);
      }
      source.prefetch(rows, task.count);
    };
    addresses(input_.k, keys);
    addresses(input_.v, values);
    kernels_.pack_keys(keys, input_.k.dtype, task.count, input_.k.dim(), dim_,
                       task.to->keys.data() + task.begin * key_bytes);
    kernels_.pack_values(values, input_.v.dtype, task.count, input_.v.dim(), v_dim_,
                         task.to->values.data() + task.begin * value_bytes);
  }

  struct Scratch {
    std::vector<RowBlockScratch> rows;  // [heads of a task]
    VisibleKeys visible;
    KeyBatch keys;
    KeyBatch masked;
  };

  void attend(const RowTask& task, const Packed& packed, const Packed& columns, int thread) {
    Scratch& scratch = scratch_[thread];
    while (std::ssize(scratch.rows) < task.heads) {
      scratch.rows.emplace_back(kernels_, input_, params_, input_.v.dim());
    }
    RowBlock* blocks[kMaxSharingHeads];
    for (std::int64_t i = 0; i < task.heads; ++i) {
      blocks[i] = &scratch.rows[i].block;
      scratch.rows[i].load(task.b, task.h + i, task.row_end - task.row_begin,
                           [&](std::int64_t row) { return task.row_begin + row; });
    }
    kept_[thread] +=
        task.heads * attend_keys(task, packed, columns, blocks, task.heads, scratch, nullptr);
    for (std::int64_t i = 0; i < task.heads; ++i) {
      RowBlock& block = *blocks[i];
      // Every row gives every value of its batches a weight, 0 included, so one that is not finite
      // shows in the first row's accumulator as well.
      if (!all_finite(block.acc, block.v_dim)) {
        kernels_.reset(block);
        NonFiniteValues values(kernels_, block.v_dim);
        attend_keys(task, packed, columns, blocks + i, 1, scratch, &values);
        values.put_back(block);
      }
      write_rows(task, task.h + i, block);
    }
  }

  // Takes row blocks of one or more of the task's heads through all of their keys; returns the
  // visible pairs of one. With `careful`, values that are not finite reach only the rows that it
  // notes.
  std::int64_t attend_keys(const RowTask& task, const Packed& packed, const Packed& columns,
                           RowBlock* const* blocks, std::int64_t n_blocks, Scratch& scratch,
                           NonFiniteValues* careful) const {
    const std::int64_t rows = blocks[0]->rows;
    scratch.visible.start(geometry_[task.b], sparse_head(index_, task.b, task.h), task.row_begin,
                          task.row_end);
    kernels_.enter();
    VisibleKeys::Tile tile;
    std::int64_t kept = 0;
    // The order of keys is free, so masked tiles are gathered apart: a mask slows a whole batch.
    KeyBatch* batches[] = {&scratch.keys, &scratch.masked};
    const std::int64_t key_bytes = dim_ * kernels_.element_size;
    const std::int64_t value_bytes = v_dim_ * kernels_.element_size;
    const auto attend_batch = [&](KeyBatch& batch) {
      if (batch.granules > 0) {
        if (careful != nullptr) careful->take_out(batch, rows);
        kernels_.attend(blocks, n_blocks, batch);
      }
      batch.clear();
    };
    const auto add_tile = [&](const Packed& from) {
      KeyBatch& batch = *batches[tile.mask == nullptr ? 0 : 1];
      if (!batch.fits(tile.count)) attend_batch(batch);
      batch.add(from.keys.data() + tile.begin * key_bytes, kKeyGranule * key_bytes,
                from.values.data() + tile.begin * value_bytes, kKeyGranule * value_bytes,
                tile.count, tile.mask, rows);
      kept += tile.pairs;
    };
    while (scratch.visible.next_keys(tile)) add_tile(packed);
    while (scratch.visible.next_columns(tile)) add_tile(columns);
    for (KeyBatch* batch : batches) attend_batch(*batch);
    kernels_.leave();
    return kept;
  }

  // Divides by the sum of exponentials and stores output and LSE.
  void write_rows(const RowTask& task, std::int64_t h, const RowBlock& block) const {
    constexpr float kLog2E = std::numbers::log2e_v<float>;
    constexpr float kLn2 = std::numbers::ln2_v<float>;
    const std::int64_t v_dim = input_.v.dim();
    for (std::int64_t r = 0; r < block.rows; ++r) {
      float sum = kernels_.row_sum(block, r);
      float shift = block.shift[r];
      float factor = 1.0F;
      // A sum of exactly 0 is a row that saw no key: the largest visible score contributes 1.
      const bool empty = sum == 0.0F;
      if (!input_.sinks.empty()) {
        const float sink = input_.sinks[h] * kLog2E;
        if (empty || sink > shift) {
          factor = empty ? 0.0F : std::exp2(shift - sink);
          sum = sum * factor + 1.0F;
          shift = sink;
        } else {
          sum += std::exp2(sink - shift);
        }
      }
      const float weight = empty ? 0.0F : factor / sum;
      const float* acc = block.acc + r * block.v_dim;
      const std::int64_t row = task.row_begin + r;
      void* out = output_.out.row(task.b, row, h);
      if (output_.out.dtype == DType::kF32) {
        auto* to = static_cast<float*>(out);
        for (std::int64_t d = 0; d < v_dim; ++d) to[d] = acc[d] * weight;
      } else {
        for (std::int64_t d = 0; d < v_dim; ++d) {
          store_element(out, output_.out.dtype, d, acc[d] * weight);
        }
      }
      if (!output_.lse.empty()) {
        *static_cast<float*>(output_.lse.row(task.b, row, h)) =
            sum == 0.0F ? -std::numeric_limits<float>::infinity() : (shift + std::log2(sum)) * kLn2;
      }
    }
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const AttentionOutput& output_;
  const SparseIndex* index_;
  const KernelTable& kernels_;
  std::int64_t group_;
  std::int64_t dim_;
  std::int64_t v_dim_;
  std::vector<SequenceGeometry> geometry_;
  std::vector<Scratch> scratch_;    // [thread]
  std::vector<std::int64_t> kept_;  // [thread]
};

}  // namespace

Stats attention_cpu(const AttentionInput& input, const AttentionParams& params,
                    const AttentionOutput& output, const SparseIndex* index, IsaLevel level) {
  const Stopwatch watch;
  Stats stats;
  stats.method = index == nullptr ? "dense" : "sparse";
  stats.isa = level;
  Execution(input, params, output, index, *kernel_table(level)).run(stats);
  stats.kernel_seconds = watch.seconds();
  return stats;
}

}  // namespace minference

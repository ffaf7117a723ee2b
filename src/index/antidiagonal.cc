#include "index/antidiagonal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kPackBudgetBytes = std::int64_t{1} << 30;

// Row blocks [begin, end) of one query head, whose cells fill a tile of rows if they are small.
struct RowTask {
  std::int64_t b;
  std::int64_t h;
  std::int64_t begin;
  std::int64_t end;
};

struct Worker {
  RowBlockScratch rows;
  AlignedBuffer<std::byte> queries;  // [stride phases][kTileRows][dim]
  std::vector<float> sums;           // [kTileRows][key blocks], relative to the rows' shifts
  std::vector<double> mass;          // [row blocks of a task][key blocks]

  Worker(const KernelTable& kernels, const AttentionInput& input, const AttentionParams& params,
         const AntidiagonalOptions& options)
      : rows(kernels, input, params, 0),
        queries(options.stride * kTileRows * rows.block.dim * kernels.element_size) {
    rows.block.score_scale /= static_cast<float>(options.stride) * static_cast<float>(options.norm);
  }
};

class Estimator {
 public:
  Estimator(const AttentionInput& input, const AttentionParams& params,
            const AntidiagonalOptions& options,
            const std::function<void(const BlockMass&)>& consume)
      : input_(input),
        params_(params),
        options_(options),
        consume_(consume),
        kernels_(*kernel_table(choose_isa(allows_bf16(input, params)))),
        group_(input.q.heads() / input.k.heads()),
        dim_(round_up(input.q.dim(), kernels_.dim_align)),
        phase_bytes_(kTileKeys * dim_ * kernels_.element_size),
        block_cells_(options.block_size / options.stride),
        workers_(resolve_threads(params.threads)),
        packed_(input.q.batch() * input.k.heads()) {
    for (std::int64_t b = 0; b < input.q.batch(); ++b) {
      grids_.emplace_back(SequenceGeometry(input, params, b), options.block_size);
    }
  }

  // Memory for the packed keys is bounded, so that more heads than fit are done in waves.
  void run() {
    std::int64_t bytes = 0;
    std::int64_t first = 0;
    const auto heads = static_cast<std::int64_t>(packed_.size());
    for (std::int64_t i = 0; i < heads; ++i) {
      const std::int64_t more = packed_bytes(i / input_.k.heads());
      if (i > first && bytes + more > kPackBudgetBytes) {
        run_wave(first, i);
        first = i;
        bytes = 0;
      }
      bytes += more;
    }
    run_wave(first, heads);
  }

 private:
  std::int64_t cells(std::int64_t tokens) const {
    return (tokens + options_.stride - 1) / options_.stride;
  }
  std::int64_t packed_bytes(std::int64_t b) const {
    const std::int64_t tiles = (cells(grids_[b].geometry().kv_len) + kTileKeys - 1) / kTileKeys;
    return tiles * options_.stride * phase_bytes_;
  }

  // KV heads [begin, end) of all sequences.
  void run_wave(std::int64_t begin, std::int64_t end) {
    struct PackTask {
      std::int64_t head;
      std::int64_t tile;
    };
    std::vector<PackTask> pack_tasks;
    std::vector<RowTask> row_tasks;
    const std::int64_t task_blocks = std::max<std::int64_t>(kTileRows / block_cells_, 1);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t b = i / input_.k.heads();
      const BlockGrid& grid = grids_[b];
      if (grid.key_blocks() == 0 || grid.row_blocks() == 0) continue;
      packed_[i] = AlignedBuffer<std::byte>(packed_bytes(b));
      for (std::int64_t tile = 0; tile * kTileKeys < cells(grid.geometry().kv_len); ++tile) {
        pack_tasks.push_back({i, tile});
      }
      for (std::int64_t g = 0; g < group_; ++g) {
        for (std::int64_t m = 0; m < grid.row_blocks(); m += task_blocks) {
          row_tasks.push_back({b, i % input_.k.heads() * group_ + g, m,
                               std::min(m + task_blocks, grid.row_blocks())});
        }
      }
    }
    parallel_for(static_cast<std::int64_t>(pack_tasks.size()), params_.threads,
                 [&](std::int64_t i, int) { pack(pack_tasks[i].head, pack_tasks[i].tile); });
    // Later rows see more keys: longest first, so that threads finish together.
    std::stable_sort(row_tasks.begin(), row_tasks.end(),
                     [](const RowTask& a, const RowTask& b) { return a.begin > b.begin; });
    parallel_for(static_cast<std::int64_t>(row_tasks.size()), params_.threads,
                 [&](std::int64_t i, int thread) { estimate(row_tasks[i], thread); });
    for (std::int64_t i = begin; i < end; ++i) packed_[i] = {};
  }

  // Packs 64 cells of keys, phase after phase: a product then sums over the phases by itself.
  void pack(std::int64_t head, std::int64_t tile) {
    const std::int64_t b = head / input_.k.heads();
    const std::int64_t stride = options_.stride;
    const std::int64_t kv_len = grids_[b].geometry().kv_len;
    const std::int64_t first = tile * kTileKeys;
    const std::int64_t count = std::min(kTileKeys, cells(kv_len) - first);
    const RowSource source(input_, input_.k, b, head % input_.k.heads());
    const void* rows[kTileKeys];
    for (std::int64_t phase = 0; phase < stride; ++phase) {
      std::byte* to = packed_[head].data() + (tile * stride + phase) * phase_bytes_;
      // The last cell may lack this phase: nothing is added for it, as for the cells behind it.
      const bool whole = (first + count - 1) * stride + phase < kv_len;
      const std::int64_t n = whole ? count : count - 1;
      for (std::int64_t c = 0; c < n; ++c) rows[c] = source.row((first + c) * stride + phase);
      if (round_up(n, kKeyGranule) < round_up(count, kKeyGranule)) {
        std::fill(to, to + phase_bytes_, std::byte{0});
      }
      kernels_.pack_keys(rows, input_.k.dtype, n, input_.k.dim(), dim_, to);
    }
  }

  // Cells of keys that the rows of cell a may see.
  BlockGrid::Range visible_cells(const SequenceGeometry& geometry, std::int64_t a) const {
    const std::int64_t row = a * options_.stride;
    const std::int64_t last = std::min(row + options_.stride, geometry.q_len) - 1;
    return {geometry.first_key(row) / options_.stride, cells(geometry.end_key(last))};
  }

  void estimate(const RowTask& task, int thread) {
    if (!workers_[thread]) workers_[thread].emplace(kernels_, input_, params_, options_);
    Worker& worker = *workers_[thread];
    const BlockGrid& grid = grids_[task.b];
    const std::int64_t key_blocks = grid.key_blocks();
    worker.mass.assign((task.end - task.begin) * key_blocks, 0.0);
    const std::int64_t end_cell = std::min(task.end * block_cells_, cells(grid.geometry().q_len));
    kernels_.enter();
    for (std::int64_t a = task.begin * block_cells_; a < end_cell; a += kTileRows) {
      add_rows(task, a, std::min(kTileRows, end_cell - a), worker);
    }
    kernels_.leave();
    for (std::int64_t m = task.begin; m < task.end; ++m) {
      const double* mass = worker.mass.data() + (m - task.begin) * key_blocks;
      consume_({task.b, task.h, m, {mass, static_cast<std::size_t>(key_blocks)}});
    }
  }

  // Adds the block sums of cell rows [first, first + count) to the task's masses.
  void add_rows(const RowTask& task, std::int64_t first, std::int64_t count, Worker& worker) {
    const SequenceGeometry& geometry = grids_[task.b].geometry();
    const std::int64_t key_blocks = grids_[task.b].key_blocks();
    RowBlock& block = worker.rows.block;
    load_queries(task, first, count, worker);
    worker.sums.assign(count * key_blocks, 0.0F);

    const std::int64_t begin = visible_cells(geometry, first).begin / kTileKeys * kTileKeys;
    const std::int64_t end = visible_cells(geometry, first + count - 1).end;
    for (std::int64_t cell = begin; cell < end; cell += kBatchKeys) {
      const std::int64_t n = std::min(kBatchKeys, end - cell);
      multiply(task, cell, n, worker);
      mask(geometry, first, cell, worker.rows);
      float shift[kTileRows];
      std::copy(block.shift, block.shift + count, shift);
      float bound[kTileRows];
      std::copy(block.bound, block.bound + count, bound);
      kernels_.exponentials(block, worker.rows.keys);
      for (std::int64_t r = 0; r < count; ++r) {
        float* sums = worker.sums.data() + r * key_blocks;
        // Before a row's first visible cell there are no sums, and its shift means nothing.
        if (block.shift[r] != shift[r] && bound[r] != -std::numeric_limits<float>::infinity()) {
          const float factor = std::exp2(shift[r] - block.shift[r]);
          std::transform(sums, sums + key_blocks, sums, [=](float sum) { return sum * factor; });
        }
        add_segments(block.scores + r * kBatchKeys, cell, n, sums);
      }
    }
    const BlockGrid::Range blocks{begin / block_cells_, (end + block_cells_ - 1) / block_cells_};
    for (std::int64_t r = 0; r < count; ++r) {
      const float total = kernels_.row_sum(block, r);
      if (total == 0.0F) continue;  // sees nothing
      const double weight = 1.0 / total;
      const float* sums = worker.sums.data() + r * key_blocks;
      double* mass = worker.mass.data() + ((first + r) / block_cells_ - task.begin) * key_blocks;
      for (std::int64_t k = blocks.begin; k < blocks.end; ++k) mass[k] += sums[k] * weight;
    }
  }

  void load_queries(const RowTask& task, std::int64_t first, std::int64_t count, Worker& worker) {
    const std::int64_t stride = options_.stride;
    const std::int64_t q_len = grids_[task.b].geometry().q_len;
    RowBlock& block = worker.rows.block;
    block.rows = count;
    kernels_.reset(block);
    const void* rows[kTileRows];
    for (std::int64_t phase = 0; phase < stride; ++phase) {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = (first + i) * stride;
        // A last cell that lacks rows repeats those it has, or some phases of the keys would
        // never be looked at: in a chunk of one row, all but one.
        const std::int64_t length = std::min(stride, q_len - row);
        rows[i] = input_.q.row(task.b, row + (stride - 1 - phase) % length, task.h);
      }
      kernels_.load_queries(rows, input_.q.dtype, count, input_.q.dim(), dim_,
                            worker.queries.data() + phase * phase_bytes_);
    }
  }

  // Scores of key cells [cell, cell + n) into the row block's scores.
  void multiply(const RowTask& task, std::int64_t cell, std::int64_t n, Worker& worker) const {
    static_assert(kTileRows == kTileKeys);  // one phase of either takes the same memory
    const std::int64_t stride = options_.stride;
    const AlignedBuffer<std::byte>& packed = packed_[task.b * input_.k.heads() + task.h / group_];
    RowBlock& block = worker.rows.block;
    for (std::int64_t i = 0; i < n; i += kTileKeys) {
      const std::int64_t tile = (cell + i) / kTileKeys;
      const void* phases[kRowBlock];
      for (std::int64_t p = 0; p < stride; ++p) {
        phases[p] = packed.data() + (tile * stride + p) * phase_bytes_;
      }
      const std::int64_t panels = round_up(std::min(kTileKeys, n - i), kKeyGranule) / kPanelWidth;
      kernels_.gemm(worker.queries.data(), kTileRows * dim_, block.rows, phases, stride, dim_,
                    panels, block.scores + i, kBatchKeys, false);
    }
    worker.rows.keys.clear();
    worker.rows.keys.granules = round_up(n, kKeyGranule) / kKeyGranule;
  }

  // Masks the cells from `cell` on that the cell rows from `first` on do not see.
  void mask(const SequenceGeometry& geometry, std::int64_t first, std::int64_t cell,
            RowBlockScratch& rows) const {
    KeyBatch& keys = rows.keys;
    const std::int64_t end = cell + keys.granules * kKeyGranule;
    keys.masked = visible_cells(geometry, first).end < end ||
                  visible_cells(geometry, first + rows.block.rows - 1).begin > cell;
    for (std::int64_t r = 0; keys.masked && r < rows.block.rows; ++r) {
      const BlockGrid::Range seen = visible_cells(geometry, first + r);
      for (std::int64_t w = 0; w < kBatchKeys / kTileKeys; ++w) {
        keys.mask[r][w] = bits(seen.begin - cell - w * kTileKeys, seen.end - cell - w * kTileKeys);
      }
    }
  }

  // Bits [begin, end) of a word.
  static std::uint64_t bits(std::int64_t begin, std::int64_t end) {
    begin = std::clamp<std::int64_t>(begin, 0, 64);
    end = std::clamp<std::int64_t>(end, 0, 64);
    if (begin >= end) return 0;
    return ~std::uint64_t{0} >> (64 - (end - begin)) << begin;
  }

  // Adds the exponentials of n cells from `cell` on to the sums of their key blocks.
  void add_segments(const float* exponentials, std::int64_t cell, std::int64_t n,
                    float* sums) const {
    std::int64_t block = cell / block_cells_;
    std::int64_t end = (block + 1) * block_cells_ - cell;
    for (std::int64_t c = 0; c < n; ++block, end += block_cells_) {
      const std::int64_t limit = std::min(n, end);
      float lanes[4] = {};  // independent sums, which fit a vector
      for (; c + 4 <= limit; c += 4) {
        for (int lane = 0; lane < 4; ++lane) lanes[lane] += exponentials[c + lane];
      }
      float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      for (; c < limit; ++c) sum += exponentials[c];
      sums[block] += sum;
    }
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const AntidiagonalOptions& options_;
  const std::function<void(const BlockMass&)>& consume_;
  const KernelTable& kernels_;
  std::int64_t group_;
  std::int64_t dim_;                              // padded
  std::int64_t phase_bytes_;                      // of one phase of 64 cells
  std::int64_t block_cells_;                      // cells along a block
  std::vector<BlockGrid> grids_;                  // [batch]
  std::vector<std::optional<Worker>> workers_;    // [thread]
  std::vector<AlignedBuffer<std::byte>> packed_;  // [batch][kv_heads], [tile][phase]
};

}  // namespace

void estimate_antidiagonals(const AttentionInput& input, const AttentionParams& params,
                            const AntidiagonalOptions& options,
                            const std::function<void(const BlockMass&)>& consume) {
  Estimator(input, params, options, consume).run();
}

}  // namespace minference

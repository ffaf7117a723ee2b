#include "index/antidiagonal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/cpu/row_block_scratch.h"
#include "attention/precision.h"
#include "core/parallel.h"
#include "index/packed_keys.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// Row blocks [begin, end) of one query head, whose cells fill a tile of rows if they are small.
struct RowTask {
  std::int64_t b;
  std::int64_t h;
  std::int64_t begin;
  std::int64_t end;
};

constexpr std::int64_t kGroups = kBatchKeys / kMaxLanes;

struct Worker {
  RowBlockScratch rows;
  float groups[kTileRows][kGroups];
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
        dim_(round_up(input.q.dim(), kernels_.dim_align)),
        phase_bytes_(kTileKeys * dim_ * kernels_.element_size),
        block_cells_(options.block_size / options.stride),
        workers_(resolve_threads(params.threads)),
        packed_(kernels_, input, params, input.q.tokens(), options.stride) {
    for (const SequenceGeometry& sequence : packed_.geometry()) {
      grids_.emplace_back(sequence, options.block_size);
    }
  }

  void run() {
    const std::vector<std::uint8_t> all(input_.q.batch() * input_.q.heads(), 1);
    packed_.in_waves(all, [&](std::span<const std::int64_t> heads) { run_heads(heads); });
  }

 private:
  std::int64_t cells(std::int64_t tokens) const {
    return (tokens + options_.stride - 1) / options_.stride;
  }

  void run_heads(std::span<const std::int64_t> heads) {
    std::vector<RowTask> tasks;
    const std::int64_t task_blocks = std::max<std::int64_t>(kTileRows / block_cells_, 1);
    for (const std::int64_t head : heads) {
      const std::int64_t b = head / input_.q.heads();
      const std::int64_t row_blocks = grids_[b].row_blocks();
      for (std::int64_t m = 0; m < row_blocks; m += task_blocks) {
        tasks.push_back({b, head % input_.q.heads(), m, std::min(m + task_blocks, row_blocks)});
      }
    }
    // Later rows see more keys: longest first, so that threads finish together.
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const RowTask& a, const RowTask& b) { return a.begin > b.begin; });
    parallel_for(static_cast<std::int64_t>(tasks.size()), params_.threads,
                 [&](std::int64_t i, int thread) { estimate(tasks[i], thread); });
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
      kernels_.exponentials(block, worker.rows.keys, whole_groups() ? worker.groups : nullptr);
      std::int64_t block_of_group[kGroups];
      for (std::int64_t g = 0; g < kGroups; ++g) {
        block_of_group[g] = (cell + g * kMaxLanes) / block_cells_;
      }
      const std::int64_t groups = (n + kMaxLanes - 1) / kMaxLanes;
      for (std::int64_t r = 0; r < count; ++r) {
        float* sums = worker.sums.data() + r * key_blocks;
        // Before a row's first visible cell there are no sums, and its shift means nothing.
        if (block.shift[r] != shift[r] && bound[r] != -std::numeric_limits<float>::infinity()) {
          const float factor = std::exp2(shift[r] - block.shift[r]);
          std::transform(sums, sums + key_blocks, sums, [=](float sum) { return sum * factor; });
        }
        if (whole_groups()) {
          for (std::int64_t g = 0; g < groups; ++g) sums[block_of_group[g]] += worker.groups[r][g];
        } else {
          add_segments(block.scores + r * kBatchKeys, cell, n, sums);
        }
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
    RowBlock& block = worker.rows.block;
    for (std::int64_t i = 0; i < n; i += kTileKeys) {
      const std::int64_t tile = (cell + i) / kTileKeys;
      const void* phases[kRowBlock];
      for (std::int64_t p = 0; p < stride; ++p) {
        phases[p] = packed_.phase(task.b, task.h, tile, p);
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
        keys.mask[r][w] = range_bits(seen.begin, seen.end, cell + w * kTileKeys);
      }
    }
  }

  // Whether the groups of cells that a kernel sums up do not straddle blocks.
  bool whole_groups() const { return block_cells_ % kMaxLanes == 0; }

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
  std::int64_t dim_;                            // padded
  std::int64_t phase_bytes_;                    // of one phase of 64 cells
  std::int64_t block_cells_;                    // cells along a block
  std::vector<BlockGrid> grids_;                // [batch]
  std::vector<std::optional<Worker>> workers_;  // [thread]
  PackedKeys packed_;
};

}  // namespace

void estimate_antidiagonals(const AttentionInput& input, const AttentionParams& params,
                            const AntidiagonalOptions& options,
                            const std::function<void(const BlockMass&)>& consume) {
  Estimator(input, params, options, consume).run();
}

}  // namespace minference

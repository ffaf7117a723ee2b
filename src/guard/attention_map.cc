#include "guard/attention_map.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "index/packed_keys.h"
#include "index/row_probabilities.h"
#include "minference/error.h"

namespace minference {

namespace {

constexpr std::int64_t kWord = 64;

}  // namespace

// One call's head. Works on rows of cells, which share nothing.
class AttentionMap::Filler {
 public:
  Filler(AttentionMap& map, const AttentionInput& input, const AttentionParams& params,
         const HeadIndex* head, std::int64_t h)
      : map_(map),
        input_(input),
        params_(params),
        head_(head),
        h_(h),
        geometry_(input, params, 0) {}

  void run() {
    const std::int64_t first = geometry_.position(0);
    const std::int64_t end = geometry_.position(geometry_.q_len);
    if (first < 0 || end > map_.tokens_) {
      throw InvalidArgument("a call with positions " + std::to_string(first) + " to " +
                            std::to_string(end - 1) + " for a map of " +
                            std::to_string(map_.tokens_) + " tokens");
    }
    if (first == end) return;
    const cpu::KernelTable& kernels = *cpu::kernel_table(choose_isa(allows_bf16(input_, params_)));
    std::vector<std::optional<Worker>> workers(resolve_threads(params_.threads));
    const std::int64_t first_cell = map_.cell(first);
    PackedKeys packed(kernels, input_, params_, geometry_.q_len);
    std::vector<std::uint8_t> wanted(input_.q.heads(), 0);
    wanted[h_] = 1;
    packed.in_waves(wanted, [&](std::span<const std::int64_t>) {
      packed_ = &packed;
      parallel_for(map_.cell(end - 1) - first_cell + 1, params_.threads,
                   [&](std::int64_t i, int thread) {
                     if (!workers[thread]) workers[thread].emplace(kernels, input_, params_);
                     fill_row(kernels, first_cell + i, *workers[thread]);
                   });
    });
  }

 private:
  struct Worker {
    RowProbabilities probabilities;
    VisibleKeys visible;
    std::vector<std::uint64_t> kept;  // [rows][words], a bit a key

    Worker(const cpu::KernelTable& kernels, const AttentionInput& input,
           const AttentionParams& params)
        : probabilities(kernels, input, params) {}
  };

  // Calls visit(column, from, to) for each column of cells that keys [begin, end) touch.
  template <class Visit>
  void for_each_column(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    end = std::min(end, geometry_.kv_len);
    while (begin < end) {
      const std::int64_t column = map_.cell(begin);
      const std::int64_t to = std::min(map_.begin(column + 1), end);
      visit(column, begin, to);
      begin = to;
    }
  }

  void fill_row(const cpu::KernelTable& kernels, std::int64_t cell, Worker& worker) {
    const std::int64_t shift = geometry_.position(0);
    const std::int64_t cell_begin = map_.begin(cell);
    const auto row_of = [&](std::int64_t position) {
      return std::clamp<std::int64_t>(position - shift, 0, geometry_.q_len);
    };
    const std::int64_t begin = row_of(cell_begin);
    const std::int64_t end = row_of(map_.begin(cell + 1));
    count(nullptr, begin, end, worker, map_.dense_pairs_.data() + cell * map_.size_);
    count(head_, begin, end, worker, map_.kept_pairs_.data() + cell * map_.size_);

    const std::int64_t sampled_end = std::min(end, row_of(cell_begin + kSampledRows));
    if (begin < sampled_end) add_mass(kernels, cell, begin, sampled_end - begin, worker);
  }

  // Adds the probabilities of rows [begin, begin + rows), at most kSampledRows, to one row of cells.
  void add_mass(const cpu::KernelTable& kernels, std::int64_t cell, std::int64_t begin,
                std::int64_t rows, Worker& worker) const {
    static_assert(kSampledRows <= cpu::kTileRows);
    const std::int64_t words = geometry_.kv_len / kWord + 2;
    worker.kept.assign(rows * words, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      worker.visible.mark_row(geometry_, head_, begin + r, worker.kept.data() + r * words);
    }
    const auto is_kept = [&](std::int64_t r, std::int64_t key) {
      return (worker.kept[r * words + key / kWord] >> (key % kWord) & 1U) != 0;
    };
    float* mass = map_.mass_sums_.data() + cell * map_.size_;
    float* lost = map_.lost_sums_.data() + cell * map_.size_;
    map_.sampled_[cell] += rows;
    kernels.enter();
    worker.probabilities.visit(
        *packed_, 0, h_, begin, rows, [&](std::int64_t first, std::int64_t n_keys, const float* p) {
          for_each_column(first, first + n_keys,
                          [&](std::int64_t column, std::int64_t from, std::int64_t to) {
                            for (std::int64_t r = 0; r < rows; ++r) {
                              const float* row = p + r * cpu::kProbabilityStride + cpu::kMaxLanes;
                              for (std::int64_t key = from; key < to; ++key) {
                                mass[column] += row[key - first];
                                if (!is_kept(r, key)) lost[column] += row[key - first];
                              }
                            }
                          });
        });
    kernels.leave();
  }

  // Adds the pairs that rows [begin, end) compute with `head` to one row of cells.
  void count(const HeadIndex* head, std::int64_t begin, std::int64_t end, Worker& worker,
             std::uint32_t* pairs) const {
    for_each_row_block(geometry_, head, begin, end, [&](std::int64_t from, std::int64_t to) {
      VisibleKeys::Tile tile;
      worker.visible.start(geometry_, head, from, to);
      while (worker.visible.next_keys(tile)) {
        for_each_column(tile.begin, tile.begin + tile.count,
                        [&](std::int64_t column, std::int64_t first, std::int64_t last) {
                          pairs[column] += static_cast<std::uint32_t>(
                              tile_pairs(tile, first - tile.begin, last - tile.begin, to - from));
                        });
      }
      while (worker.visible.next_columns(tile)) {
        for (std::int64_t c = 0; c < tile.count; ++c) {
          const std::int64_t seen = tile_pairs(tile, c, c + 1, to - from);
          if (seen == 0) continue;  // also past the head's last column
          pairs[map_.cell(head->columns[tile.begin + c])] += static_cast<std::uint32_t>(seen);
        }
      }
    });
  }

  // Visible pairs of a tile's keys [begin, end).
  static std::int64_t tile_pairs(const VisibleKeys::Tile& tile, std::int64_t begin,
                                 std::int64_t end, std::int64_t rows) {
    if (tile.mask == nullptr) return (end - begin) * rows;
    const std::uint64_t bits = (end - begin == kWord ? ~0ULL : (1ULL << (end - begin)) - 1)
                               << begin;
    std::int64_t pairs = 0;
    for (std::int64_t r = 0; r < rows; ++r) pairs += std::popcount(tile.mask[r] & bits);
    return pairs;
  }

  AttentionMap& map_;
  const AttentionInput& input_;
  const AttentionParams& params_;
  const HeadIndex* head_;
  std::int64_t h_;
  SequenceGeometry geometry_;
  const PackedKeys* packed_ = nullptr;  // during run()
};

AttentionMap::AttentionMap(std::int64_t tokens)
    : tokens_(tokens), size_(std::min(tokens, kMaxSize)) {
  if (tokens < 1) {
    throw InvalidArgument("a map of " + std::to_string(tokens) + " tokens; legal: 1 or more");
  }
  sampled_.assign(size_, 0);
  mass_sums_.assign(size_ * size_, 0.0F);
  lost_sums_.assign(size_ * size_, 0.0F);
  kept_pairs_.assign(size_ * size_, 0);
  dense_pairs_.assign(size_ * size_, 0);
}

void AttentionMap::add(const AttentionInput& input, const AttentionParams& params,
                       const SparseIndex* index, std::int64_t h) {
  Filler(*this, input, params, sparse_head(index, 0, h), h).run();
}

bool AttentionMap::visible(std::int64_t row, std::int64_t column) const {
  return dense_pairs_[row * size_ + column] > 0;
}

double AttentionMap::mean(const std::vector<float>& sums, std::int64_t row,
                          std::int64_t column) const {
  if (sampled_[row] == 0) return 0.0;
  return sums[row * size_ + column] / static_cast<double>(sampled_[row]);
}

double AttentionMap::mass(std::int64_t row, std::int64_t column) const {
  return mean(mass_sums_, row, column);
}

double AttentionMap::lost(std::int64_t row, std::int64_t column) const {
  return mean(lost_sums_, row, column);
}

double AttentionMap::kept(std::int64_t row, std::int64_t column) const {
  const std::int64_t cell = row * size_ + column;
  return visible(row, column)
             ? static_cast<double>(kept_pairs_[cell]) / static_cast<double>(dense_pairs_[cell])
             : 0.0;
}

}  // namespace minference

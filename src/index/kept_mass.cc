#include "index/kept_mass.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/row_block_scratch.h"
#include "attention/cpu/row_source.h"
#include "attention/precision.h"
#include "attention/visible_keys.h"
#include "core/aligned_buffer.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

// Keys of one task: many beside what loading the rows takes, few enough for many threads.
constexpr std::int64_t kSegmentKeys = 4096;

constexpr std::int64_t kBatchWords = kBatchKeys / 64;

// One bit per key for each of several rows.
class RowBits {
 public:
  void reset(std::int64_t rows, std::int64_t kv_len) {
    words_ = round_up(kv_len, kBatchKeys) / 64 + 1;  // mark_row() needs one more
    bits_.assign(rows * words_, 0);
  }
  std::uint64_t* row(std::int64_t i) { return bits_.data() + i * words_; }
  // Those of a batch of keys from `key` on.
  const std::uint64_t* batch(std::int64_t i, std::int64_t key) const {
    return bits_.data() + i * words_ + key / 64;
  }

 private:
  std::int64_t words_ = 0;
  std::vector<std::uint64_t> bits_;  // [rows][words_]
};

// Exponentials of one row over one segment, relative to `shift`.
struct SegmentSum {
  double kept = 0;
  double left_out = 0;
  double all = 0;
  float shift = 0;
};

// Wanted heads of one KV head.
struct Group {
  std::int64_t kv_head = 0;
  std::vector<std::int64_t> heads;  // positions in SequenceMass::heads_
};

// One thread's memory.
struct Worker {
  std::vector<RowBlockScratch> blocks;  // as many heads' rows in each as it holds
  AlignedBuffer<std::byte> packed;      // a batch of keys
  std::uint64_t kept[kTileRows][kBatchWords];
  float added[kTileRows][2];
};

// What the sampled rows of one sequence see of a batch of keys.
enum class Seen { kNothing, kSome, kAll };

class SequenceMass {
 public:
  SequenceMass(const AttentionInput& input, const AttentionParams& params,
               const KeptMassRequest& request, std::int64_t b)
      : input_(input),
        params_(params),
        kernels_(*kernel_table(choose_isa(allows_bf16(input, params)))),
        geometry_(input, params, b),
        b_(b),
        rows_(request.rows[b]),
        least_key_(request.least_key),
        dim_(round_up(input.q.dim(), kernels_.dim_align)),
        workers_(resolve_threads(params.threads)) {
    if (rows_.empty() || geometry_.kv_len == 0) return;
    const std::int64_t group = input.q.heads() / input.k.heads();
    for (std::int64_t h = 0; h < input.q.heads(); ++h) {
      if (request.heads[b * input.q.heads() + h] == nullptr) continue;
      if (groups_.empty() || groups_.back().kv_head != h / group)
        groups_.push_back({h / group, {}});
      groups_.back().heads.push_back(static_cast<std::int64_t>(heads_.size()));
      heads_.push_back({h, request.heads[b * input.q.heads() + h], {}});
    }
  }

  // Calls visit(h, masses) for each wanted head.
  template <class Visit>
  void run(Visit&& visit) {
    if (heads_.empty()) return;
    mark();
    const std::int64_t first = geometry_.first_key(rows_.front()) / kSegmentKeys;
    const std::int64_t end = (geometry_.kv_len + kSegmentKeys - 1) / kSegmentKeys;
    segments_ = std::max<std::int64_t>(end - first, 0);
    sums_.assign(heads_.size() * rows_.size() * segments_, {});
    const auto n_groups = static_cast<std::int64_t>(groups_.size());
    parallel_for(n_groups * segments_, params_.threads, [&](std::int64_t i, int thread) {
      add_segment(groups_[i / segments_], i % segments_, (first + i % segments_) * kSegmentKeys,
                  workers_[thread]);
    });
    std::vector<RowMass> masses(rows_.size());
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        masses[r] = merge(sums_.data() + (i * rows_.size() + r) * segments_);
      }
      visit(heads_[i].h, masses);
    }
  }

 private:
  struct Head {
    std::int64_t h;
    const HeadIndex* index;
    RowBits kept;
  };

  std::int64_t n_rows() const { return static_cast<std::int64_t>(rows_.size()); }

  void mark() {
    VisibleKeys keys;
    visible_.reset(n_rows(), geometry_.kv_len);
    for (std::int64_t r = 0; r < n_rows(); ++r) {
      keys.mark_row(geometry_, nullptr, rows_[r], visible_.row(r));
    }
    std::vector<VisibleKeys> walks(workers_.size());
    parallel_for(static_cast<std::int64_t>(heads_.size()), params_.threads,
                 [&](std::int64_t i, int thread) {
                   Head& head = heads_[i];
                   head.kept.reset(n_rows(), geometry_.kv_len);
                   for (std::int64_t r = 0; r < n_rows(); ++r) {
                     walks[thread].mark_row(geometry_, head.index, rows_[r], head.kept.row(r));
                   }
                 });
  }

  std::int64_t heads_of_block() const { return kTileRows / n_rows(); }

  void load_rows(const Group& group, Worker& worker) {
    const auto heads = static_cast<std::int64_t>(group.heads.size());
    if (worker.packed.size() == 0) {
      worker.packed = AlignedBuffer<std::byte>(kBatchKeys * dim_ * kernels_.element_size);
    }
    for (std::int64_t i = 0; i * heads_of_block() < heads; ++i) {
      if (static_cast<std::size_t>(i) == worker.blocks.size()) {
        worker.blocks.emplace_back(kernels_, input_, params_, 0);
      }
      const void* addresses[kTileRows];
      std::int64_t count = 0;
      for (std::int64_t j = i * heads_of_block(); j < std::min((i + 1) * heads_of_block(), heads);
           ++j) {
        for (const std::int64_t row : rows_) {
          addresses[count++] = input_.q.row(b_, row, heads_[group.heads[j]].h);
        }
      }
      worker.blocks[i].load(addresses, count);
    }
  }

  Seen seen(std::int64_t key) const {
    std::uint64_t any = 0;
    std::uint64_t every = ~std::uint64_t{0};
    for (std::int64_t r = 0; r < n_rows(); ++r) {
      for (std::int64_t w = 0; w < kBatchWords; ++w) {
        any |= visible_.batch(r, key)[w];
        every &= visible_.batch(r, key)[w];
      }
    }
    if (any == 0) return Seen::kNothing;
    return every == ~std::uint64_t{0} ? Seen::kAll : Seen::kSome;
  }

  // Packs the batch of keys at `key`, and asks for the next one.
  void pack(const RowSource& source, std::int64_t key, Worker& worker) const {
    const void* rows[kTileKeys];
    const auto tile = [&](std::int64_t begin) {
      const std::int64_t n = std::clamp<std::int64_t>(geometry_.kv_len - begin, 0, kTileKeys);
      source.rows(begin, n, rows);
      return n;
    };
    for (std::int64_t i = 0; i < kBatchKeys; i += kTileKeys) {
      const std::int64_t n = tile(key + i);
      if (n == 0) continue;
      kernels_.pack_keys(rows, input_.k.dtype, n, input_.k.dim(), dim_,
                         worker.packed.data() + i * dim_ * kernels_.element_size);
    }
    for (std::int64_t i = kBatchKeys; i < 2 * kBatchKeys; i += kTileKeys) {
      source.prefetch(rows, tile(key + i));
    }
  }

  void add_segment(const Group& group, std::int64_t segment, std::int64_t first, Worker& worker) {
    const auto heads = static_cast<std::int64_t>(group.heads.size());
    const std::int64_t blocks = (heads + heads_of_block() - 1) / heads_of_block();
    const RowSource source(input_, input_.k, b_, group.kv_head);
    load_rows(group, worker);
    kernels_.enter();
    const std::int64_t end = std::min(first + kSegmentKeys, geometry_.kv_len);
    for (std::int64_t key = first; key < end; key += kBatchKeys) {
      const Seen what = seen(key);
      if (what == Seen::kNothing) continue;
      pack(source, key, worker);
      for (std::int64_t i = 0; i < blocks; ++i) {
        add_batch(group, i * heads_of_block(), segment, key, what, worker.blocks[i], worker);
      }
    }
    kernels_.leave();
    for (std::int64_t j = 0; j < heads; ++j) {
      const RowBlock& block = worker.blocks[j / heads_of_block()].block;
      for (std::int64_t r = 0; r < n_rows(); ++r) {
        const std::int64_t row = j % heads_of_block() * n_rows() + r;
        sum_of(group.heads[j], r, segment).all = kernels_.row_sum(block, row);
      }
    }
  }

  // Adds a batch of keys to the rows of a block, which are those of the group's heads from
  // `first_head` on.
  void add_batch(const Group& group, std::int64_t first_head, std::int64_t segment,
                 std::int64_t key, Seen what, RowBlockScratch& rows, Worker& worker) {
    RowBlock& block = rows.block;
    KeyBatch& keys = rows.keys;
    if (key < least_key_) {
      // Keys that count nowhere else have their share of each row's sum.
      set_keys(1, worker, keys);
      mask(key, 0, least_key_, block.rows, keys);
      kernels_.sum_exponentials(block, keys);
    }
    set_keys(round_up(std::min(kBatchKeys, geometry_.kv_len - key), kKeyGranule) / kKeyGranule,
             worker, keys);
    if (what != Seen::kAll || key < least_key_) {
      mask(key, least_key_, geometry_.kv_len, block.rows, keys);
    }
    for (std::int64_t row = 0; row < block.rows; ++row) {
      const Head& head = heads_[group.heads[first_head + row / n_rows()]];
      std::copy_n(head.kept.batch(row % n_rows(), key), kBatchWords, worker.kept[row]);
    }
    kernels_.split_exponentials(block, keys, worker.kept, worker.added);
    for (std::int64_t row = 0; row < block.rows; ++row) {
      SegmentSum& sum = sum_of(group.heads[first_head + row / n_rows()], row % n_rows(), segment);
      if (sum.shift != block.shift[row]) {
        const double factor = std::exp2(static_cast<double>(sum.shift) - block.shift[row]);
        if (sum.kept > 0) sum.kept *= factor;
        if (sum.left_out > 0) sum.left_out *= factor;
        sum.shift = block.shift[row];
      }
      sum.kept += worker.added[row][0];
      sum.left_out += worker.added[row][1];
    }
  }

  void set_keys(std::int64_t granules, const Worker& worker, KeyBatch& keys) const {
    keys.clear();
    keys.granules = granules;
    for (std::int64_t g = 0; g < granules; ++g) {
      keys.keys[g] = worker.packed.data() + g * kKeyGranule * dim_ * kernels_.element_size;
    }
  }

  // Of the batch at `key`, the keys from `begin` to `end` that rows see.
  void mask(std::int64_t key, std::int64_t begin, std::int64_t end, std::int64_t rows,
            KeyBatch& keys) const {
    keys.masked = true;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t w = 0; w < kBatchWords; ++w) {
        keys.mask[row][w] =
            visible_.batch(row % n_rows(), key)[w] & range_bits(begin, end, key + w * 64);
      }
    }
  }

  SegmentSum& sum_of(std::int64_t head, std::int64_t row, std::int64_t segment) {
    return sums_[(head * n_rows() + row) * segments_ + segment];
  }

  // A row's sums over all segments, brought to one shift.
  RowMass merge(const SegmentSum* sums) const {
    float shift = -std::numeric_limits<float>::infinity();
    for (std::int64_t s = 0; s < segments_; ++s) {
      if (sums[s].all != 0) shift = std::max(shift, sums[s].shift);
    }
    RowMass mass;
    double all = 0;
    for (std::int64_t s = 0; s < segments_; ++s) {
      if (sums[s].all == 0) continue;  // nothing is seen there, and the shift means nothing
      const double factor = std::exp2(static_cast<double>(sums[s].shift) - shift);
      mass.kept += sums[s].kept * factor;
      mass.left_out += sums[s].left_out * factor;
      all += sums[s].all * factor;
    }
    if (all != 0) {
      mass.kept /= all;
      mass.left_out /= all;
    }
    return mass;
  }

  const AttentionInput& input_;
  const AttentionParams& params_;
  const KernelTable& kernels_;
  SequenceGeometry geometry_;
  std::int64_t b_;
  const std::vector<std::int64_t>& rows_;
  std::int64_t least_key_;
  std::int64_t dim_;             // padded
  std::vector<Worker> workers_;  // [thread]
  std::vector<Head> heads_;      // the wanted ones
  std::vector<Group> groups_;
  RowBits visible_;  // without an index
  std::int64_t segments_ = 0;
  std::vector<SegmentSum> sums_;  // [heads_][rows_][segments_]
};

}  // namespace

void for_each_kept_mass(
    const AttentionInput& input, const AttentionParams& params, const KeptMassRequest& request,
    const std::function<void(std::int64_t i, std::span<const RowMass> masses)>& consume) {
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    SequenceMass(input, params, request, b).run([&](std::int64_t h, const auto& masses) {
      consume(b * input.q.heads() + h, masses);
    });
  }
}

}  // namespace minference

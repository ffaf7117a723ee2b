#include "index/packed_keys.h"

#include <algorithm>

#include "attention/cpu/row_source.h"
#include "core/parallel.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kPackBudgetBytes = std::int64_t{1} << 30;

}  // namespace

PackedKeys::PackedKeys(const KernelTable& kernels, const AttentionInput& input,
                       const AttentionParams& params, std::int64_t last_rows, std::int64_t stride)
    : kernels_(kernels),
      input_(input),
      params_(params),
      last_rows_(last_rows),
      stride_(stride),
      group_(input.q.heads() / input.k.heads()),
      dim_(round_up(input.q.dim(), kernels.dim_align)),
      key_bytes_(dim_ * kernels.element_size),
      packed_(input.q.batch() * input.k.heads()) {
  for (std::int64_t b = 0; b < input.q.batch(); ++b) geometry_.emplace_back(input, params, b);
}

void PackedKeys::in_waves(std::span<const std::uint8_t> wanted,
                          const std::function<void(std::span<const std::int64_t>)>& work) {
  const auto kv_heads = static_cast<std::int64_t>(packed_.size());
  std::vector<std::int64_t> heads;
  std::vector<std::uint8_t> needed(kv_heads, 0);
  std::int64_t bytes = 0;
  std::int64_t first = 0;
  const auto run = [&](std::int64_t end) {
    if (!heads.empty()) {
      pack_wave(first, end, needed);
      work(heads);
      for (std::int64_t i = first; i < end; ++i) packed_[i] = {};
    }
    heads.clear();
    bytes = 0;
    first = end;
  };
  // The query heads of KV head i are i * group_ on: both count the heads of one sequence before
  // those of the next.
  for (std::int64_t i = 0; i < kv_heads; ++i) {
    const SequenceGeometry& sequence = geometry_[i / input_.k.heads()];
    if (sequence.q_len == 0 || sequence.kv_len == 0) continue;
    const auto of_group = wanted.subspan(i * group_, group_);
    if (std::all_of(of_group.begin(), of_group.end(), [](auto w) { return w == 0; })) continue;
    const std::int64_t more = round_up(cells(sequence.kv_len), kTileKeys) * stride_ * key_bytes_;
    if (bytes > 0 && bytes + more > kPackBudgetBytes) run(i);
    bytes += more;
    needed[i] = 1;
    packed_[i] = AlignedBuffer<std::byte>(more);
    for (std::int64_t g = 0; g < group_; ++g) {
      if (of_group[g] != 0) heads.push_back(i * group_ + g);
    }
  }
  run(kv_heads);
}

// Packs the needed ones of KV heads [begin, end).
void PackedKeys::pack_wave(std::int64_t begin, std::int64_t end,
                           std::span<const std::uint8_t> needed) {
  struct Task {
    std::int64_t head;
    std::int64_t tile;
  };
  std::vector<Task> tasks;
  for (std::int64_t i = begin; i < end; ++i) {
    if (needed[i] == 0) continue;
    const SequenceGeometry& sequence = geometry_[i / input_.k.heads()];
    const std::int64_t row = std::max<std::int64_t>(sequence.q_len - last_rows_, 0);
    // From the beginning of a batch on, so that whole batches can be multiplied.
    constexpr std::int64_t kTiles = kBatchKeys / kTileKeys;
    const std::int64_t first_tile = sequence.first_key(row) / stride_ / kBatchKeys * kTiles;
    for (std::int64_t tile = first_tile; tile * kTileKeys < cells(sequence.kv_len); ++tile) {
      tasks.push_back({i, tile});
    }
  }
  parallel_for(static_cast<std::int64_t>(tasks.size()), params_.threads,
               [&](std::int64_t i, int) { pack(tasks[i].head, tasks[i].tile); });
}

void PackedKeys::pack(std::int64_t head, std::int64_t tile) {
  const std::int64_t b = head / input_.k.heads();
  const std::int64_t kv_len = geometry_[b].kv_len;
  const std::int64_t first = tile * kTileKeys;
  const std::int64_t count = std::min(kTileKeys, cells(kv_len) - first);
  const RowSource source(input_, input_.k, b, head % input_.k.heads());
  const void* rows[kTileKeys];
  // A granule of cells at a time: phases jump through memory, and what they jump through is asked for in
  // order before and fits the first-level cache.
  for (std::int64_t cell = 0; cell < count; cell += kKeyGranule) {
    const std::int64_t n_cells = std::min(kKeyGranule, count - cell);
    const std::int64_t begin = (first + cell) * stride_;
    const std::int64_t end = std::min(begin + n_cells * stride_, kv_len);
    for (std::int64_t key = begin; key < end; key += kTileKeys) {
      const std::int64_t n = std::min(kTileKeys, end - key);
      source.rows(key, n, rows);
      source.prefetch(rows, n);
    }
    for (std::int64_t phase = 0; phase < stride_; ++phase) {
      std::byte* to =
          packed_[head].data() + ((tile * stride_ + phase) * kTileKeys + cell) * key_bytes_;
      // The last cell may lack this phase: nothing is added for it, as for the cells behind it.
      const std::int64_t n = begin + (n_cells - 1) * stride_ + phase < end ? n_cells : n_cells - 1;
      for (std::int64_t c = 0; c < n; ++c) rows[c] = source.row(begin + c * stride_ + phase);
      if (n == 0) std::fill_n(to, kKeyGranule * key_bytes_, std::byte{0});
      kernels_.pack_keys(rows, input_.k.dtype, n, input_.k.dim(), dim_, to);
    }
  }
}

}  // namespace minference

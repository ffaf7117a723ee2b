#include "index/pooled.h"

#include <algorithm>

#include "attention/cpu/row_source.h"
#include "attention/score.h"
#include "attention/visible_keys.h"
#include "core/parallel.h"
#include "index/mean_rows.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

}  // namespace

PooledKeys::PooledKeys(const AttentionInput& input, const AttentionParams& params,
                       std::int64_t block_size, std::span<const std::uint8_t> wanted)
    : input_(input),
      params_(params),
      kernels_(*kernel_table(choose_isa(false))),
      block_size_(block_size),
      dim_(round_up(input.q.dim(), kernels_.dim_align)),
      heads_(input.k.heads() * input.q.batch()) {
  struct Task {
    std::int64_t b;
    std::int64_t kv_head;
    std::int64_t tile;
  };
  std::vector<Task> tasks;
  const std::int64_t group = input.q.heads() / input.k.heads();
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t kv_len = SequenceGeometry(input, params, b).kv_len;
    for (std::int64_t kv_head = 0; kv_head < input.k.heads(); ++kv_head) {
      const auto first = wanted.begin() + b * input.q.heads() + kv_head * group;
      if (std::all_of(first, first + group, [](std::uint8_t w) { return w == 0; })) continue;
      Head& head = heads_[b * input.k.heads() + kv_head];
      head.key_blocks = (kv_len + block_size - 1) / block_size;
      const std::int64_t tiles = (head.key_blocks + kTileKeys - 1) / kTileKeys;
      head.packed = AlignedBuffer<std::byte>(tiles * kTileKeys * dim_ * kernels_.element_size);
      for (std::int64_t tile = 0; tile < tiles; ++tile) tasks.push_back({b, kv_head, tile});
    }
  }
  parallel_for(static_cast<std::int64_t>(tasks.size()), params.threads,
               [&](std::int64_t i, int) { pool(tasks[i].b, tasks[i].kv_head, tasks[i].tile); });
}

void PooledKeys::pool(std::int64_t b, std::int64_t kv_head, std::int64_t tile) {
  Head& head = heads_[b * input_.k.heads() + kv_head];
  const std::int64_t kv_len = SequenceGeometry(input_, params_, b).kv_len;
  const std::int64_t count = std::min(kTileKeys, head.key_blocks - tile * kTileKeys);
  const RowSource source(input_, input_.k, b, kv_head);
  AlignedBuffer<float> means(kTileKeys * input_.k.dim());
  std::vector<const void*> rows;
  const void* addresses[kTileKeys];
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t key = (tile * kTileKeys + i) * block_size_;
    float* mean = means.data() + i * input_.k.dim();
    mean_rows(
        kernels_, std::min(block_size_, kv_len - key), input_.k.dtype, input_.k.dim(), rows,
        [&](std::int64_t j) { return source.row(key + j); }, mean);
    addresses[i] = mean;
  }
  kernels_.pack_keys(addresses, DType::kF32, count, input_.k.dim(), dim_,
                     head.packed.data() + tile * kTileKeys * dim_ * kernels_.element_size);
}

PooledKeys::Scores PooledKeys::scores(std::int64_t b, std::int64_t h, std::int64_t first_row,
                                      std::int64_t end_row, std::int64_t group_rows,
                                      std::int64_t key_blocks, Scratch& scratch) const {
  const Head& head = heads_[b * input_.k.heads() + h / (input_.q.heads() / input_.k.heads())];
  const std::int64_t dim = input_.q.dim();
  const std::int64_t groups =
      std::min(kTileRows, (end_row - first_row + group_rows - 1) / group_rows);
  const std::int64_t stride = round_up(key_blocks, kTileKeys);
  if (scratch.means.size() == 0) {
    scratch.means = AlignedBuffer<float>(kTileRows * dim);
    scratch.queries = AlignedBuffer<std::byte>(kTileRows * dim_ * kernels_.element_size);
  }
  if (scratch.scores.size() < kTileRows * stride) {
    scratch.scores = AlignedBuffer<float>(kTileRows * stride);
  }

  std::vector<const void*> rows;
  const void* addresses[kTileRows];
  for (std::int64_t i = 0; i < groups; ++i) {
    const std::int64_t row = first_row + i * group_rows;
    float* mean = scratch.means.data() + i * dim;
    mean_rows(
        kernels_, std::min(group_rows, end_row - row), input_.q.dtype, dim, rows,
        [&](std::int64_t j) { return input_.q.row(b, row + j, h); }, mean);
    addresses[i] = mean;
  }
  kernels_.load_queries(addresses, DType::kF32, groups, dim, dim_, scratch.queries.data());
  kernels_.enter();
  for (std::int64_t n = 0; n < key_blocks; n += kTileKeys) {
    const void* packed = head.packed.data() + n * dim_ * kernels_.element_size;
    const std::int64_t count = round_up(std::min(kTileKeys, key_blocks - n), kKeyGranule);
    kernels_.gemm(scratch.queries.data(), 0, groups, &packed, 1, dim_, count / kPanelWidth,
                  scratch.scores.data() + n, stride, false);
  }
  kernels_.leave();

  const float scale = score_scale(input_, params_);
  for (std::int64_t i = 0; i < groups; ++i) {
    float* row = scratch.scores.data() + i * stride;
    for (std::int64_t n = 0; n < key_blocks; ++n) {
      row[n] = soft_capped(scale * row[n], params_.soft_cap);
    }
  }
  return {scratch.scores.data(), stride, groups};
}

}  // namespace minference

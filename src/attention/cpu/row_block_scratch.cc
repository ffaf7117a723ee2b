#include "attention/cpu/row_block_scratch.h"

#include <cstddef>
#include <numbers>

#include "attention/score.h"

namespace minference::cpu {

RowBlockScratch::RowBlockScratch(const KernelTable& kernels, const AttentionInput& input,
                                 const AttentionParams& params, std::int64_t v_dim)
    : kernels_(&kernels), input_(&input) {
  block.score_scale = score_scale(input, params) * std::numbers::log2e_v<float>;
  block.dim = round_up(input.q.dim(), kernels.dim_align);
  block.v_dim = round_up(v_dim, kValueAlign);
  block.soft_cap = params.soft_cap * std::numbers::log2e_v<float>;

  const std::int64_t q_bytes = kTileRows * block.dim * kernels.element_size;
  const std::int64_t p_bytes = kTileRows * kBatchKeys * kernels.element_size;
  elements_ = AlignedBuffer<std::byte>(q_bytes + p_bytes);
  block.q = elements_.data();
  block.p = elements_.data() + q_bytes;

  const std::int64_t score_count = kTileRows * kBatchKeys;
  const std::int64_t acc_count = kTileRows * block.v_dim;
  const std::int64_t sum_count = kTileRows * kMaxLanes;
  floats_ = AlignedBuffer<float>(score_count + acc_count + sum_count + 2 * kTileRows);
  float* next = floats_.data();
  block.scores = next;
  next += score_count;
  block.acc = acc_count > 0 ? next : nullptr;
  next += acc_count;
  block.lane_sum = next;
  next += sum_count;
  block.shift = next;
  block.bound = next + kTileRows;
}

}  // namespace minference::cpu

#include "support/naive.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/reference/reference.h"
#include "core/float16.h"

namespace minference::test {
namespace {

float rounded(float value, bool bf16) {
  return bf16 ? bf16_to_f32(f32_to_bf16(value)) : value;
}

// Elements of one row, times `factor`, rounded.
void load(const void* data, DType dtype, std::int64_t dim, float factor, bool bf16, float* row) {
  for (std::int64_t d = 0; d < dim; ++d) {
    row[d] = rounded(load_element(data, dtype, d) * factor, bf16);
  }
}

std::vector<float> load_kv_head(const AttentionInput& input, const TensorView& tensor,
                                std::int64_t b, std::int64_t h, bool bf16) {
  std::vector<float> rows(key_length(input, b) * tensor.dim());
  for (std::int64_t t = 0; t < key_length(input, b); ++t) {
    const void* data = tensor.row(b, t, h);
    if (!input.block_table.empty()) {
      const std::int64_t page_size = tensor.tokens();
      const std::int64_t entry = b * input.pages_per_sequence + t / page_size;
      data = tensor.row(input.block_table[entry], t % page_size, h);
    }
    load(data, tensor.dtype, tensor.dim(), 1, bf16, rows.data() + t * tensor.dim());
  }
  return rows;
}

float dot(const float* a, const float* b, std::int64_t size) {
  float sums[4] = {0, 0, 0, 0};
  std::int64_t i = 0;
  for (; i + 4 <= size; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

}  // namespace

void naive_attention(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const SparseIndex* index, bool bf16) {
  const std::int64_t dim = input.q.dim();
  const std::int64_t v_dim = input.v.dim();
  const float scale =
      params.scale != 0 ? params.scale : 1 / std::sqrt(static_cast<float>(dim));
  std::vector<float> q(dim);
  std::vector<float> out(v_dim);
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    const std::int64_t kv_len = key_length(input, b);
    std::vector<float> scores(kv_len);
    for (std::int64_t h = 0; h < input.q.heads(); ++h) {
      const std::int64_t kv_head = h / (input.q.heads() / input.k.heads());
      const std::vector<float> keys = load_kv_head(input, input.k, b, kv_head, bf16);
      const std::vector<float> values = load_kv_head(input, input.v, b, kv_head, bf16);
      const std::vector<std::uint8_t> mask = explicit_mask(input, params, b, h, index);
      for (std::int64_t row = 0; row < query_length(input, b); ++row) {
        load(input.q.row(b, row, h), input.q.dtype, dim, scale, bf16, q.data());
        const std::uint8_t* sees = mask.data() + row * kv_len;
        bool any = false;
        float maximum = input.sinks.empty() ? -std::numeric_limits<float>::infinity()
                                            : input.sinks[h];
        for (std::int64_t key = 0; key < kv_len; ++key) {
          if (sees[key] == 0) continue;
          any = true;
          scores[key] = dot(q.data(), keys.data() + key * dim, dim);
          if (params.soft_cap > 0) {
            scores[key] = params.soft_cap * std::tanh(scores[key] / params.soft_cap);
          }
          maximum = std::max(maximum, scores[key]);
        }
        float sum = input.sinks.empty() ? 0 : std::exp(input.sinks[h] - maximum);
        std::fill(out.begin(), out.end(), 0.0F);
        for (std::int64_t key = 0; key < kv_len; ++key) {
          if (sees[key] == 0) continue;
          const float weight = std::exp(scores[key] - maximum);
          sum += weight;
          const float p = rounded(weight, bf16);
          for (std::int64_t d = 0; d < v_dim; ++d) out[d] += p * values[key * v_dim + d];
        }
        for (std::int64_t d = 0; d < v_dim; ++d) {
          store_element(output.out.row(b, row, h), output.out.dtype, d, any ? out[d] / sum : 0);
        }
        if (!output.lse.empty()) {
          store_element(output.lse.row(b, row, h), DType::kF32, 0,
                        any ? maximum + std::log(sum) : maximum);
        }
      }
    }
  }
}

}  // namespace minference::test

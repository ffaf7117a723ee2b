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

float rounded(float value, bool bf16) { return bf16 ? bf16_to_f32(f32_to_bf16(value)) : value; }

// Row t of head h of sequence b, through the block table where there is one.
const void* kv_row(const AttentionInput& input, const TensorView& tensor, std::int64_t b,
                   std::int64_t t, std::int64_t h) {
  if (input.block_table.empty()) return tensor.row(b, t, h);
  const std::int64_t page_size = tensor.tokens();
  const std::int64_t page = input.block_table[b * input.pages_per_sequence + t / page_size];
  return tensor.row(page, t % page_size, h);
}

// One KV head of one sequence in f32, rounded where asked.
struct Head {
  std::vector<float> keys;    // [dim][kv_len]
  std::vector<float> values;  // [kv_len][v_dim]

  Head(const AttentionInput& input, std::int64_t b, std::int64_t h, bool bf16) {
    const std::int64_t kv_len = key_length(input, b);
    const std::int64_t dim = input.k.dim();
    const std::int64_t v_dim = input.v.dim();
    keys.resize(dim * kv_len);
    values.resize(kv_len * v_dim);
    for (std::int64_t t = 0; t < kv_len; ++t) {
      const void* key = kv_row(input, input.k, b, t, h);
      const void* value = kv_row(input, input.v, b, t, h);
      for (std::int64_t d = 0; d < dim; ++d) {
        keys[d * kv_len + t] = rounded(load_element(key, input.k.dtype, d), bf16);
      }
      for (std::int64_t d = 0; d < v_dim; ++d) {
        values[t * v_dim + d] = rounded(load_element(value, input.v.dtype, d), bf16);
      }
    }
  }
};

// One query row: fills `out` and returns the LSE. sees: [kv_len]; q: rounded.
float attend(const std::vector<float>& q, const Head& head, const std::uint8_t* sees, float scale,
             float soft_cap, float sink, bool bf16, std::vector<float>& out) {
  const std::size_t kv_len = head.values.size() / out.size();
  std::vector<float> scores(kv_len, 0.0F);
  for (std::size_t d = 0; d < q.size(); ++d) {
    const float* keys = head.keys.data() + d * kv_len;
    for (std::size_t key = 0; key < kv_len; ++key) scores[key] += q[d] * keys[key];
  }
  std::fill(out.begin(), out.end(), 0.0F);
  float maximum = sink;
  bool any = false;
  for (std::size_t key = 0; key < kv_len; ++key) {
    if (sees[key] == 0) continue;
    any = true;
    scores[key] *= scale;
    if (soft_cap > 0) scores[key] = soft_cap * std::tanh(scores[key] / soft_cap);
    maximum = std::max(maximum, scores[key]);
  }
  if (!any) return sink;
  float sum = std::exp(sink - maximum);
  for (std::size_t key = 0; key < kv_len; ++key) {
    if (sees[key] == 0) continue;
    const float weight = std::exp(scores[key] - maximum);
    const float p = rounded(weight, bf16);
    const float* value = head.values.data() + key * out.size();
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += p * value[d];
  }
  for (float& value : out) value /= sum;
  return maximum + std::log(sum);
}

}  // namespace

void naive_attention(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, const SparseIndex* index, bool bf16) {
  const float scale =
      params.scale != 0 ? params.scale : 1 / std::sqrt(static_cast<float>(input.q.dim()));
  std::vector<float> q(input.q.dim());
  std::vector<float> out(input.v.dim());
  for (std::int64_t b = 0; b < input.q.batch(); ++b) {
    for (std::int64_t h = 0; h < input.q.heads(); ++h) {
      const Head head(input, b, h / (input.q.heads() / input.k.heads()), bf16);
      const std::vector<std::uint8_t> mask = explicit_mask(input, params, b, h, index);
      const float sink =
          input.sinks.empty() ? -std::numeric_limits<float>::infinity() : input.sinks[h];
      for (std::int64_t row = 0; row < query_length(input, b); ++row) {
        const void* q_row = input.q.row(b, row, h);
        for (std::size_t d = 0; d < q.size(); ++d) {
          q[d] = rounded(load_element(q_row, input.q.dtype, static_cast<std::int64_t>(d)), bf16);
        }
        const float lse = attend(q, head, mask.data() + row * key_length(input, b), scale,
                                 params.soft_cap, sink, bf16, out);
        void* out_row = output.out.row(b, row, h);
        for (std::size_t d = 0; d < out.size(); ++d) {
          store_element(out_row, output.out.dtype, static_cast<std::int64_t>(d), out[d]);
        }
        if (!output.lse.empty()) store_element(output.lse.row(b, row, h), DType::kF32, 0, lse);
      }
    }
  }
}

}  // namespace minference::test

#include "bench/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "attention/reference/reference.h"
#include "core/float16.h"
#include "core/parallel.h"

namespace minference::bench {
namespace {

constexpr std::int64_t kSamples = 8;

// Row block `block` of a head's index, as the index of a chunk that holds only these rows.
HeadIndex slice(const HeadIndex& head, std::int64_t block, std::int64_t end, std::int64_t tokens) {
  HeadIndex part = head;
  if (head.kind == HeadIndex::Kind::kBlock) {
    part.block_ids.assign(head.block_ids.begin() + head.block_begin[block],
                          head.block_ids.begin() + head.block_begin[block + 1]);
    part.block_begin = {0, static_cast<std::int64_t>(part.block_ids.size())};
  }
  part.dense_last_rows = std::max<std::int64_t>(0, end - (tokens - head.dense_last_rows));
  return part;
}

}  // namespace

AttentionProblem::AttentionProblem(const ProblemShape& shape) : shape_(shape) {
  const std::int64_t head_dim = shape.head_dim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& values, std::int64_t heads, bool rotary) {
    values.resize(shape.tokens * heads * head_dim);
    for (float& value : values) value = normal(random);
    for (std::int64_t t = 0; rotary && t < shape.tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        float* row = values.data() + (t * heads + h) * head_dim;
        for (std::int64_t i = 0; i + 1 < head_dim; i += 2) {
          const double exponent = -static_cast<double>(i) / static_cast<double>(head_dim);
          const double angle = static_cast<double>(t) * std::pow(10000.0, exponent);
          row[i] += 1.5F * static_cast<float>(std::cos(angle));
          row[i + 1] += 1.5F * static_cast<float>(std::sin(angle));
        }
      }
    }
  };
  fill(q_, shape.q_heads, true);
  fill(k_, shape.kv_heads, true);
  fill(v_, shape.kv_heads, false);
  // A direction that every query has and heavy keys share.
  for (std::size_t i = 0; i < q_.size(); i += head_dim) q_[i] += 3.0F;
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    const float weight = t < 4 ? 16.0F : (random() % 64 == 0 ? 8.0F : 0.0F);
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      k_[(t * shape.kv_heads + h) * head_dim] += weight;
    }
  }
  out_.resize(q_.size());
  for (const float value : k_) k16_.push_back(f32_to_f16(value));
  for (const float value : v_) v16_.push_back(f32_to_f16(value));
}

AttentionInput AttentionProblem::input() {
  const auto& [tokens, q_heads, kv_heads, head_dim] = shape_;
  AttentionInput in;
  in.q = TensorView::contiguous(q_.data(), DType::kF32, {1, tokens, q_heads, head_dim});
  in.k = TensorView::contiguous(k16_.data(), DType::kF16, {1, tokens, kv_heads, head_dim});
  in.v = TensorView::contiguous(v16_.data(), DType::kF16, {1, tokens, kv_heads, head_dim});
  return in;
}

AttentionOutput AttentionProblem::output() {
  AttentionOutput out;
  out.out = TensorView::contiguous(out_.data(), DType::kF32,
                                   {1, shape_.tokens, shape_.q_heads, shape_.head_dim});
  return out;
}

AttentionInput AttentionProblem::one_head_input() { return chunk(0, 0, shape_.tokens); }

AttentionOutput AttentionProblem::one_head_output() {
  AttentionOutput out = output();
  out.out.shape[2] = 1;
  return out;
}

double AttentionProblem::causal_pairs() const {
  return static_cast<double>(shape_.tokens) * static_cast<double>(shape_.tokens + 1) / 2.0;
}

AttentionInput AttentionProblem::rows(std::int64_t begin, std::int64_t end) {
  AttentionInput in = input();
  in.q.data = in.q.row(0, begin, 0);
  in.q.shape[1] = end - begin;
  in.k.shape[1] = end;
  in.v.shape[1] = end;
  return in;
}

AttentionInput AttentionProblem::chunk(std::int64_t head, std::int64_t begin, std::int64_t end) {
  AttentionInput in = rows(begin, end);
  in.q.data = in.q.row(0, 0, head);
  in.q.shape[2] = 1;
  for (TensorView* view : {&in.k, &in.v}) {
    view->data = view->row(0, 0, head / (shape_.q_heads / shape_.kv_heads));
    view->shape[2] = 1;
  }
  return in;
}

ExpectedRows::ExpectedRows(AttentionProblem& problem, const SparseIndex* index, int threads)
    : shape_(problem.shape()) {
  const std::int64_t blocks = (shape_.tokens + kRowBlock - 1) / kRowBlock;
  const std::int64_t count = std::min(kSamples, blocks);
  const std::int64_t head_step = std::max<std::int64_t>(1, shape_.q_heads / kSamples);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t block = count > 1 ? i * (blocks - 1) / (count - 1) : 0;
    Sample sample;
    sample.head = i * head_step % shape_.q_heads;
    sample.begin = block * kRowBlock;
    sample.end = std::min(sample.begin + kRowBlock, shape_.tokens);
    samples_.push_back(std::move(sample));
  }
  parallel_for(count, threads, [&](std::int64_t i, int) {
    Sample& sample = samples_[i];
    const std::int64_t rows = sample.end - sample.begin;
    sample.rows.resize(rows * shape_.head_dim);
    AttentionOutput output;
    output.out =
        TensorView::contiguous(sample.rows.data(), DType::kF32, {1, rows, 1, shape_.head_dim});
    SparseIndex part;
    if (index != nullptr) {
      part.batch = 1;
      part.q_heads = 1;
      part.heads = {
          slice(index->head(0, sample.head), sample.begin / kRowBlock, sample.end, shape_.tokens)};
    }
    attention_reference(problem.chunk(sample.head, sample.begin, sample.end), {}, output,
                        index != nullptr ? &part : nullptr);
  });
}

double ExpectedRows::error_of(const float* result) const {
  double error = 0.0;
  double largest = 0.0;
  for (const Sample& sample : samples_) {
    for (std::int64_t row = sample.begin; row < sample.end; ++row) {
      const float* actual = result + (row * shape_.q_heads + sample.head) * shape_.head_dim;
      const float* expected = sample.rows.data() + (row - sample.begin) * shape_.head_dim;
      for (std::int64_t d = 0; d < shape_.head_dim; ++d) {
        const double apart = std::abs(static_cast<double>(actual[d]) - expected[d]);
        if (std::isnan(apart)) return std::numeric_limits<double>::quiet_NaN();
        error = std::max(error, apart);
        largest = std::max(largest, std::abs(static_cast<double>(expected[d])));
      }
    }
  }
  return error / largest;
}

}  // namespace minference::bench

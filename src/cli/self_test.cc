#include "cli/self_test.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "attention/cpu/executor.h"
#include "attention/reference/reference.h"
#include "core/stopwatch.h"

namespace minference::cli {
namespace {

// A chunk in the middle of a sequence, grouped heads, sizes that are no multiple of any tile.
constexpr std::int64_t kRows = 150;
constexpr std::int64_t kKeys = 333;
constexpr std::int64_t kQueryHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 80;

class Problem {
 public:
  Problem()
      : q_(kRows * kQueryHeads * kDim),
        k_(kKeys * kKvHeads * kDim),
        v_(k_.size()),
        out_(q_.size()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* values : {&q_, &k_, &v_}) {
      for (float& value : *values) value = normal(random);
    }
    input_.q = TensorView::contiguous(q_.data(), DType::kF32, {1, kRows, kQueryHeads, kDim});
    input_.k = TensorView::contiguous(k_.data(), DType::kF32, {1, kKeys, kKvHeads, kDim});
    input_.v = TensorView::contiguous(v_.data(), DType::kF32, {1, kKeys, kKvHeads, kDim});
    output_.out = TensorView::contiguous(out_.data(), DType::kF32, {1, kRows, kQueryHeads, kDim});
  }

  std::vector<float> reference(const SparseIndex* index) {
    attention_reference(input_, params_, output_, index);
    return out_;
  }
  std::vector<float> kernel(const SparseIndex* index, IsaLevel level) {
    AttentionParams params = params_;
    params.precision = isa_is_bf16(level) ? Precision::kBF16 : Precision::kF32;
    attention_cpu(input_, params, output_, index, level);
    return out_;
  }

 private:
  std::vector<float> q_;
  std::vector<float> k_;
  std::vector<float> v_;
  std::vector<float> out_;
  AttentionInput input_;
  AttentionParams params_;
  AttentionOutput output_;
};

// Columns and diagonals on two heads, key blocks on one, everything on the last.
SparseIndex make_index() {
  SparseIndex index;
  index.batch = 1;
  index.q_heads = kQueryHeads;
  index.heads.resize(kQueryHeads);
  for (HeadIndex* head : {&index.heads[0], &index.heads[1]}) {
    head->kind = HeadIndex::Kind::kDiagonal;
    head->columns = {0, 1, 2, 70, 200, 331};
    head->runs = {{0, 40, 1}, {100, 130, 1}};
    if (head == &index.heads[1]) head->rounding = RunRounding::kNone;
  }
  HeadIndex& blocks = index.heads[2];
  blocks.kind = HeadIndex::Kind::kBlock;
  blocks.block_begin = {0, 2, 4, 7};
  blocks.block_ids = {0, 3, 1, 4, 0, 2, 5};
  return index;
}

}  // namespace

SelfTestResult self_test(IsaLevel level) {
  const Stopwatch watch;
  SelfTestResult result;
  // Outputs are averages of values of unit variance. f32 levels differ from fp64 by sums of a few
  // hundred roundings of 2^-24. bf16 levels round each input and probability to 2^-9 of its size:
  // scores (standard deviation 1) move by about 1e-2, the few largest probabilities with them.
  result.bound = isa_is_bf16(level) ? 5e-2 : 2e-5;
  Problem problem;
  const SparseIndex sparse = make_index();
  for (const SparseIndex* index : {static_cast<const SparseIndex*>(nullptr), &sparse}) {
    const std::vector<float> expected = problem.reference(index);
    const std::vector<float> actual = problem.kernel(index, level);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
      // A NaN must fail.
      if (!(error <= result.max_error)) result.max_error = error;
      if (std::isnan(error)) return result;
    }
  }
  result.seconds = watch.seconds();
  return result;
}

}  // namespace minference::cli

// The judge itself, judged by hand: tiny inputs whose result can be written down.
#include "attention/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace minference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One sequence, one head_dim: k[j] and v[j] are given, every query is `q`.
struct Toy {
  std::vector<float> q, k, v, out, lse;
  AttentionInput input;
  AttentionParams params;
  AttentionOutput output;

  Toy(std::int64_t q_len, float query, std::vector<float> keys, std::vector<float> values,
      std::int64_t q_heads = 1, std::int64_t kv_heads = 1)
      : q(q_len * q_heads, query),
        k(std::move(keys)),
        v(std::move(values)),
        out(q.size()),
        lse(q.size()) {
    const auto kv_len = static_cast<std::int64_t>(k.size()) / kv_heads;
    input.q = TensorView::contiguous(q.data(), DType::kF32, {1, q_len, q_heads, 1});
    input.k = TensorView::contiguous(k.data(), DType::kF32, {1, kv_len, kv_heads, 1});
    input.v = TensorView::contiguous(v.data(), DType::kF32, {1, kv_len, kv_heads, 1});
    output.out = TensorView::contiguous(out.data(), DType::kF32, {1, q_len, q_heads, 1});
    output.lse = TensorView::contiguous(lse.data(), DType::kF32, {1, q_len, q_heads, 1});
  }

  void run(const SparseIndex* index = nullptr) {
    attention_reference(input, params, output, index);
  }
  // Rows of the explicit mask of head 0, '1' for a visible key.
  std::vector<std::string> mask(const SparseIndex* index = nullptr) const {
    const std::vector<std::uint8_t> bytes = explicit_mask(input, params, 0, 0, index);
    std::vector<std::string> rows(input.q.tokens());
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      rows[i / (bytes.size() / rows.size())] += bytes[i] != 0 ? '1' : '0';
    }
    return rows;
  }
};

// A row of a mask: hidden keys, visible ones, hidden ones again.
std::string row(std::int64_t before, std::int64_t visible, std::int64_t after) {
  return std::string(before, '0') + std::string(visible, '1') + std::string(after, '0');
}

SparseIndex index_of(const HeadIndex& head) {
  SparseIndex index;
  index.batch = 1;
  index.q_heads = 1;
  index.heads = {head};
  return index;
}

TEST(Reference, WeighsValuesBySoftmax) {
  // Scores 0 and ln 3: weights 1/4 and 3/4.
  Toy toy(1, 1, {0, std::log(3.0F)}, {8, 4});
  toy.run();
  EXPECT_NEAR(toy.out[0], 8 * 0.25 + 4 * 0.75, 1e-6);
  EXPECT_NEAR(toy.lse[0], std::log(4.0), 1e-6);
}

TEST(Reference, ScalesAndCaps) {
  Toy toy(1, 1, {0, 2}, {0, 1});
  toy.params.scale = 0.5F;
  toy.run();
  EXPECT_NEAR(toy.out[0], 1 / (1 + std::exp(-1.0)), 1e-6);
  toy.params.soft_cap = 2;
  toy.run();
  EXPECT_NEAR(toy.out[0], 1 / (1 + std::exp(-2 * std::tanh(0.5))), 1e-6);
}

TEST(Reference, DefaultScaleIsOneOverTheRootOfTheDim) {
  std::vector<float> q(16, 1.0F);
  Toy toy(1, 1, {0, 0}, {0, 1});
  std::vector<float> k(32, 0.0F);
  k[16] = 4 * std::log(3.0F);  // first element of key 1: its score is 4 ln 3 / sqrt(16)
  toy.input.q = TensorView::contiguous(q.data(), DType::kF32, {1, 1, 1, 16});
  toy.input.k = TensorView::contiguous(k.data(), DType::kF32, {1, 2, 1, 16});
  toy.run();
  EXPECT_NEAR(toy.out[0], 0.75, 1e-6);
}

TEST(Reference, SinksTakeWeightWithoutValue) {
  Toy toy(1, 1, {0}, {1});
  const std::vector<float> sinks = {std::log(3.0F)};
  toy.input.sinks = sinks;
  toy.run();
  EXPECT_NEAR(toy.out[0], 0.25, 1e-6);
  EXPECT_NEAR(toy.lse[0], std::log(4.0), 1e-6);
}

TEST(Reference, RowsThatSeeNothing) {
  Toy toy(2, 1, {0}, {5});  // the first row stands at position -1
  toy.run();
  EXPECT_EQ(toy.out, (std::vector<float>{0, 5}));
  EXPECT_EQ(toy.lse, (std::vector<float>{-kInfinity, 0}));
  const std::vector<float> sinks = {2};
  toy.input.sinks = sinks;
  toy.run();
  EXPECT_EQ(toy.out[0], 0);
  EXPECT_EQ(toy.lse[0], 2);
}

TEST(Reference, CausalityIsBottomRight) {
  EXPECT_EQ(Toy(2, 0, {0, 0, 0, 0}, {0, 0, 0, 0}).mask(),
            (std::vector<std::string>{"1110", "1111"}));
  EXPECT_EQ(Toy(3, 0, {0, 0}, {0, 0}).mask(), (std::vector<std::string>{"00", "10", "11"}));
}

TEST(Reference, WindowAndBidirectionalRows) {
  Toy toy(3, 0, {0, 0, 0, 0}, {0, 0, 0, 0});
  toy.params.sliding_window = 2;
  EXPECT_EQ(toy.mask(), (std::vector<std::string>{"1100", "0110", "0011"}));
  toy.params.causal = false;
  EXPECT_EQ(toy.mask(), (std::vector<std::string>{"1111", "0111", "0011"}));
  toy.params.sliding_window = 0;
  EXPECT_EQ(toy.mask(), (std::vector<std::string>{"1111", "1111", "1111"}));
}

TEST(Reference, TheMaskReplacesCausalityOnly) {
  Toy toy(2, 0, {0, 0, 0}, {0, 0, 0});
  const std::vector<std::uint64_t> words = {0b101, 0b110};
  toy.input.mask = {words.data(), 1, 2};
  EXPECT_EQ(toy.mask(), (std::vector<std::string>{"101", "011"}));
  toy.params.sliding_window = 1;
  EXPECT_EQ(toy.mask(), (std::vector<std::string>{"001", "001"}));
}

TEST(Reference, LengthsCutRowsAndKeys) {
  Toy toy(3, 0, {0, 0, 0, 0}, {1, 2, 3, 4});
  toy.out.assign(3, -7);
  const std::vector<std::int64_t> q_lens = {2};
  const std::vector<std::int64_t> kv_lens = {3};
  toy.input.q_lens = q_lens;
  toy.input.kv_lens = kv_lens;
  toy.run();
  EXPECT_EQ(toy.out, (std::vector<float>{1.5F, 2, -7}));
}

TEST(Reference, QueryHeadsShareKvHeads) {
  Toy toy(1, 0, {0, 0}, {1, 2}, 6, 2);  // one token, two KV heads with values 1 and 2
  toy.run();
  EXPECT_EQ(toy.out, (std::vector<float>{1, 1, 1, 2, 2, 2}));
}

TEST(Reference, PagesAreLookedUp) {
  Toy toy(1, 0, {0, 0, 0, 0, 0, 0}, {1, 2, 4, 8, 16, 32});
  toy.input.k.shape = toy.input.v.shape = {3, 2, 1, 1};
  toy.input.k.strides = toy.input.v.strides = {2, 1, 1, 1};
  const std::vector<std::int32_t> table = {2, 0};
  const std::vector<std::int64_t> kv_lens = {3};
  toy.input.block_table = table;
  toy.input.pages_per_sequence = 2;
  toy.input.kv_lens = kv_lens;
  toy.run();
  EXPECT_NEAR(toy.out[0], (16 + 32 + 1) / 3.0, 1e-5);
}

TEST(Reference, ExactRunsAndColumns) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.rounding = RunRounding::kNone;
  head.columns = {0};
  head.runs = {{1, 2, 1}, {3, 6, 2}};  // offsets 1, 3, 5
  const SparseIndex index = index_of(head);
  const Toy toy(3, 0, std::vector<float>(7), std::vector<float>(7));
  EXPECT_EQ(toy.mask(&index), (std::vector<std::string>{"1101000", "1010100", "1101010"}));
}

TEST(Reference, UnionRunsCoverWholeRowBlocksAndGranules) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.runs = {{5, 6}};
  const SparseIndex index = index_of(head);
  // Rows 0 ... 63 are one block: offset 5 of any of them, keys 0 ... 58, rounded to 64. The block of
  // row 64 is cut to one row: key 59, rounded to keys 32 ... 63.
  const Toy toy(65, 0, std::vector<float>(65), std::vector<float>(65));
  const std::vector<std::string> mask = toy.mask(&index);
  EXPECT_EQ(mask[0], row(0, 1, 64));
  EXPECT_EQ(mask[40], row(0, 41, 24));
  EXPECT_EQ(mask[63], row(0, 64, 1));
  EXPECT_EQ(mask[64], row(32, 32, 1));
}

TEST(Reference, BlocksAndDenseLastRows) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kBlock;
  head.block_begin = {0, 1, 1};
  head.block_ids = {0};
  head.dense_last_rows = 2;
  const SparseIndex index = index_of(head);
  const Toy toy(70, 0, std::vector<float>(70), std::vector<float>(70));
  const std::vector<std::string> mask = toy.mask(&index);
  EXPECT_EQ(mask[10], row(0, 11, 59));
  EXPECT_EQ(mask[67], row(70, 0, 0));
  EXPECT_EQ(mask[68], row(0, 69, 1));
  EXPECT_EQ(mask[69], row(0, 70, 0));
}

TEST(Reference, CountsPairsOverHeads) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.rounding = RunRounding::kNone;
  head.runs = {{0, 1}};
  SparseIndex index = index_of(head);
  index.q_heads = 2;
  index.heads.push_back(HeadIndex());
  Toy toy(4, 0, std::vector<float>(4), std::vector<float>(4), 2, 1);
  const Stats stats = attention_reference(toy.input, toy.params, toy.output, &index);
  EXPECT_EQ(stats.causal_pairs, 20);
  EXPECT_EQ(stats.kept_pairs, 4 + 10);
}

TEST(Reference, RowScoresIncludeInvisibleKeys) {
  Toy toy(1, 2, {1, 3}, {0, 0});
  toy.params.sliding_window = 1;
  EXPECT_EQ(row_scores(toy.input, toy.params, 0, 0, 0), (std::vector<double>{2, 6}));
}

}  // namespace
}  // namespace minference

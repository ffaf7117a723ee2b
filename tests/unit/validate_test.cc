// One test per refusal of attention()'s contract, and the edges that are legal.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "minference/attention.h"
#include "minference/error.h"

namespace minference {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A legal call: batch 2, 3 query rows, 5 keys, 4 query and 2 KV heads, head_dim 8, v_head_dim 6.
struct Call {
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8);
  std::vector<float> k = std::vector<float>(2 * 5 * 2 * 8);
  std::vector<float> v = std::vector<float>(2 * 5 * 2 * 6);
  std::vector<float> out = std::vector<float>(2 * 3 * 4 * 6);
  std::vector<float> lse = std::vector<float>(2 * 3 * 4);
  std::vector<std::int64_t> q_lens;
  std::vector<std::int64_t> kv_lens;
  std::vector<std::int32_t> block_table;
  std::vector<float> sinks;
  std::vector<std::uint64_t> words = std::vector<std::uint64_t>(64);
  AttentionInput input;
  AttentionParams params;
  AttentionOutput output;

  Call() {
    input.q = TensorView::contiguous(q.data(), DType::kF32, {2, 3, 4, 8});
    input.k = TensorView::contiguous(k.data(), DType::kF32, {2, 5, 2, 8});
    input.v = TensorView::contiguous(v.data(), DType::kF32, {2, 5, 2, 6});
    output.out = TensorView::contiguous(out.data(), DType::kF32, {2, 3, 4, 6});
    output.lse = TensorView::contiguous(lse.data(), DType::kF32, {2, 3, 4, 1});
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // K and V as five pages of two tokens; each sequence may have up to four tokens.
  void page() {
    input.k = TensorView::contiguous(k.data(), DType::kF32, {5, 2, 2, 8});
    input.v = TensorView::contiguous(v.data(), DType::kF32, {5, 2, 2, 6});
    block_table = {4, 0, 2, -1};
    kv_lens = {4, 1};
    input.pages_per_sequence = 2;
  }
  void set_mask(std::int64_t row_stride, std::int64_t sequence_stride) {
    input.mask = {words.data(), row_stride, sequence_stride};
  }
  void check() {
    input.q_lens = q_lens;
    input.kv_lens = kv_lens;
    input.block_table = block_table;
    input.sinks = sinks;
    validate(input, params, output);
  }
};

using Change = std::function<void(Call&)>;

void expect_legal(const Change& change) {
  Call call;
  change(call);
  EXPECT_NO_THROW(call.check());
}

// Expects a refusal whose message contains `words`.
void expect_refused(const std::string& words, const Change& change) {
  Call call;
  change(call);
  try {
    call.check();
    FAIL() << "not refused: " << words;
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

TEST(Validate, AcceptsALegalCall) {
  expect_legal([](Call&) {});
  expect_legal([](Call& c) { c.page(); });
}

TEST(Validate, AcceptsNoLse) {
  expect_legal([](Call& c) { c.output.lse = {}; });
}

TEST(Validate, AcceptsMoreRowsThanKeys) {
  expect_legal([](Call& c) { c.kv_lens = {1, 0}; });
}

TEST(Validate, AcceptsEmptyBatchAndTokens) {
  expect_legal([](Call& c) {
    c.input.q.shape[0] = c.input.k.shape[0] = c.input.v.shape[0] = 0;
    c.output.out.shape[0] = c.output.lse.shape[0] = 0;
  });
  expect_legal([](Call& c) {
    c.input.q.shape[1] = c.output.out.shape[1] = c.output.lse.shape[1] = 0;
    c.input.q.data = nullptr;
  });
  expect_legal([](Call& c) {
    c.input.k.shape[1] = c.input.v.shape[1] = 0;
    c.input.k.data = c.input.v.data = nullptr;
  });
}

TEST(Validate, AcceptsAnyStrideOfInputs) {
  expect_legal([](Call& c) {
    c.input.k.strides[0] = 0;
    c.input.v.strides[1] = -12;
  });
  expect_legal([](Call& c) {  // the stride of a dim of one element is never used
    c.input.q.shape[3] = c.input.k.shape[3] = 1;
    c.input.q.strides[3] = 77;
  });
}

TEST(Validate, RefusesDTypes) {
  expect_refused("q has dtype 7", [](Call& c) { c.input.q.dtype = static_cast<DType>(7); });
  expect_refused("k has dtype 7", [](Call& c) { c.input.k.dtype = static_cast<DType>(7); });
  expect_refused("v has dtype 7", [](Call& c) { c.input.v.dtype = static_cast<DType>(7); });
  expect_refused("out has dtype 7", [](Call& c) { c.output.out.dtype = static_cast<DType>(7); });
}

TEST(Validate, RefusesMissingData) {
  expect_refused("q has no data", [](Call& c) { c.input.q.data = nullptr; });
  expect_refused("k has no data", [](Call& c) { c.input.k.data = nullptr; });
  expect_refused("v has no data", [](Call& c) { c.input.v.data = nullptr; });
  expect_refused("out has no data", [](Call& c) { c.output.out.data = nullptr; });
}

TEST(Validate, RefusesMisalignedData) {
  expect_refused("k has data at an address that is no multiple of 4",
                 [](Call& c) { c.input.k.data = reinterpret_cast<char*>(c.k.data()) + 2; });
}

TEST(Validate, RefusesNegativeExtents) {
  expect_refused("q has tokens extent -1", [](Call& c) { c.input.q.shape[1] = -1; });
  expect_refused("k has batch extent -2", [](Call& c) { c.input.k.shape[0] = -2; });
}

TEST(Validate, RefusesStridesAlongDim) {
  expect_refused("q has stride 2 along dim", [](Call& c) { c.input.q.strides[3] = 2; });
  expect_refused("k has stride 0 along dim", [](Call& c) { c.input.k.strides[3] = 0; });
  expect_refused("v has stride -1 along dim", [](Call& c) { c.input.v.strides[3] = -1; });
  expect_refused("out has stride 3 along dim", [](Call& c) { c.output.out.strides[3] = 3; });
}

TEST(Validate, RefusesOverlappingOutputs) {
  expect_refused("out has stride 0", [](Call& c) { c.output.out.strides[1] = 0; });
  expect_refused("lse has stride 0", [](Call& c) { c.output.lse.strides[2] = 0; });
}

TEST(Validate, RefusesOverflow) {
  const std::int64_t huge = std::int64_t{1} << 61;
  expect_refused("the byte extent of q", [=](Call& c) { c.input.q.strides[0] = huge; });
  expect_refused("the byte extent of k", [=](Call& c) { c.input.k.strides[1] = -4 * huge; });
  expect_refused("the number of (row, key) pairs", [](Call& c) {
    // Broadcast tensors may claim any extent.
    const std::int64_t tokens = std::int64_t{1} << 40;
    c.input.q.shape[1] = tokens;
    c.input.q.strides[1] = 0;
    c.input.k.shape[1] = c.input.v.shape[1] = tokens;
    c.input.k.strides[1] = c.input.v.strides[1] = 0;
  });
}

TEST(Validate, RefusesKeysUnlikeValues) {
  expect_refused("only their last extent may differ", [](Call& c) { c.input.v.shape[0] = 1; });
  expect_refused("only their last extent may differ", [](Call& c) { c.input.v.shape[1] = 4; });
  expect_refused("only their last extent may differ", [](Call& c) { c.input.v.shape[2] = 1; });
}

TEST(Validate, RefusesAnotherBatch) {
  expect_refused("k has batch 1; legal: that of q, 2",
                 [](Call& c) { c.input.k.shape[0] = c.input.v.shape[0] = 1; });
}

TEST(Validate, RefusesHeadCounts) {
  expect_refused("q has 3 heads and k and v have 2", [](Call& c) { c.input.q.shape[2] = 3; });
  expect_refused("q has 1 heads and k and v have 2", [](Call& c) { c.input.q.shape[2] = 1; });
  expect_refused("q has 0 heads", [](Call& c) { c.input.q.shape[2] = 0; });
  expect_refused("k and v have 0", [](Call& c) { c.input.k.shape[2] = c.input.v.shape[2] = 0; });
}

TEST(Validate, RefusesHeadDims) {
  expect_refused("head_dim of q is 0; legal: 1 to 256",
                 [](Call& c) { c.input.q.shape[3] = c.input.k.shape[3] = 0; });
  expect_refused("head_dim of q is 257; legal: 1 to 256",
                 [](Call& c) { c.input.q.shape[3] = c.input.k.shape[3] = 257; });
  expect_refused("head_dim of v is 257; legal: 1 to 256",
                 [](Call& c) { c.input.v.shape[3] = 257; });
  expect_refused("head_dim of k is 4; legal: that of q, 8",
                 [](Call& c) { c.input.k.shape[3] = 4; });
}

TEST(Validate, RefusesLengths) {
  expect_refused("q_lens has 1 entries", [](Call& c) { c.q_lens = {3}; });
  expect_refused("q_lens[1] is 4; legal: 0 to 3", [](Call& c) { c.q_lens = {3, 4}; });
  expect_refused("q_lens[0] is -1; legal: 0 to 3", [](Call& c) { c.q_lens = {-1, 3}; });
  expect_refused("kv_lens has 3 entries", [](Call& c) { c.kv_lens = {5, 5, 5}; });
  expect_refused("kv_lens[1] is 6; legal: 0 to 5", [](Call& c) { c.kv_lens = {5, 6}; });
  expect_refused("kv_lens[0] is -1; legal: 0 to 5", [](Call& c) { c.kv_lens = {-1, 5}; });
}

// As page(), then changed.
Change paged(const Change& change) {
  return [change](Call& c) {
    c.page();
    change(c);
  };
}

TEST(Validate, RefusesBlockTables) {
  expect_refused("kv_lens has 0 entries", paged([](Call& c) { c.kv_lens.clear(); }));
  expect_refused("kv_lens[0] is 5; legal: 0 to 4", paged([](Call& c) { c.kv_lens = {5, 1}; }));
  expect_refused("block_table has 3 entries", paged([](Call& c) { c.block_table.pop_back(); }));
  expect_refused("pages_per_sequence is 0", paged([](Call& c) { c.input.pages_per_sequence = 0; }));
  expect_refused("pages_per_sequence is -2",
                 paged([](Call& c) { c.input.pages_per_sequence = -2; }));
  expect_refused("block_table entry 1 of sequence 0 is 5; legal: 0 to 4",
                 paged([](Call& c) { c.block_table[1] = 5; }));
  expect_refused("block_table entry 0 of sequence 1 is -1; legal: 0 to 4",
                 paged([](Call& c) { c.block_table[2] = -1; }));
  expect_refused("page_size is 0",
                 paged([](Call& c) { c.input.k.shape[1] = c.input.v.shape[1] = 0; }));
  expect_refused("pages_per_sequence is 2 without a block table",
                 [](Call& c) { c.input.pages_per_sequence = 2; });
}

TEST(Validate, AcceptsAnythingBehindTheLastUsedPage) {
  expect_legal(paged([](Call& c) { c.block_table[3] = 1000; }));
  expect_legal(paged([](Call& c) {
    c.kv_lens = {0, 0};
    c.block_table = {-1, -1, -1, -1};
  }));
}

TEST(Validate, RefusesMaskStrides) {
  expect_refused("row_stride of the mask is 0", [](Call& c) { c.set_mask(0, 0); });
  expect_refused("row_stride of the mask is -1", [](Call& c) { c.set_mask(-1, 8); });
  expect_refused("sequence_stride of the mask is 2", [](Call& c) { c.set_mask(1, 2); });
  expect_refused("sequence_stride of the mask is -3", [](Call& c) { c.set_mask(1, -3); });
  expect_refused("the size of the mask overflows",
                 [](Call& c) { c.set_mask(std::int64_t{1} << 62, 0); });
}

TEST(Validate, AcceptsMaskStrides) {
  expect_legal([](Call& c) { c.set_mask(1, 3); });
  expect_legal([](Call& c) { c.set_mask(2, 0); });  // one mask for every sequence
  expect_legal([](Call& c) {
    c.q_lens = {1, 1};  // single rows need no row stride
    c.set_mask(0, 1);
  });
}

TEST(Validate, RefusesSinks) {
  expect_refused("sinks has 2 entries", [](Call& c) { c.sinks = {0, 0}; });
  expect_refused("sinks[1] is", [](Call& c) { c.sinks = {0, kNaN, 0, 0}; });
  expect_refused("sinks[3] is inf", [](Call& c) { c.sinks = {0, 0, 0, kInfinity}; });
  expect_legal([](Call& c) { c.sinks = {0, -kInfinity, 1, 2}; });
}

TEST(Validate, RefusesScale) {
  expect_refused("scale is", [](Call& c) { c.params.scale = kNaN; });
  expect_refused("scale is inf", [](Call& c) { c.params.scale = kInfinity; });
  expect_legal([](Call& c) { c.params.scale = -1; });
}

TEST(Validate, RefusesSoftCap) {
  expect_refused("soft_cap is", [](Call& c) { c.params.soft_cap = kNaN; });
  expect_refused("soft_cap is inf", [](Call& c) { c.params.soft_cap = kInfinity; });
  expect_refused("soft_cap is -1", [](Call& c) { c.params.soft_cap = -1; });
}

TEST(Validate, RefusesOtherParameters) {
  expect_refused("sliding_window is -1", [](Call& c) { c.params.sliding_window = -1; });
  expect_refused("threads is -1", [](Call& c) { c.params.threads = -1; });
  expect_refused("threads is 1000000", [](Call& c) { c.params.threads = 1000000; });
  expect_refused("precision is 5", [](Call& c) { c.params.precision = static_cast<Precision>(5); });
}

TEST(Validate, RefusesOutputs) {
  expect_refused("out has shape [2, 3, 4, 8]; legal: [2, 3, 4, 6]",
                 [](Call& c) { c.output.out.shape[3] = 8; });
  expect_refused("out has shape [2, 2, 4, 6]", [](Call& c) { c.output.out.shape[1] = 2; });
  expect_refused("lse has shape [2, 3, 4, 2]", [](Call& c) { c.output.lse.shape[3] = 2; });
  expect_refused("dtype f16; legal: [2, 3, 4, 1] of f32",
                 [](Call& c) { c.output.lse.dtype = DType::kF16; });
}

TEST(Validate, AttentionItselfRefuses) {
  Call call;
  call.params.soft_cap = -1;
  EXPECT_THROW(attention(call.input, call.params, call.output), InvalidArgument);
  call.params.soft_cap = 0;
  const SparseIndex index;  // for no sequence at all
  EXPECT_THROW(attention(call.input, call.params, call.output, &index), InvalidArgument);
}

}  // namespace
}  // namespace minference

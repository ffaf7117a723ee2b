// What of CUDA needs no device: the index as it is laid out for one, and how a call is refused where
// there is no library, another one, or no device.
#include "minference/cuda.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/cuda/host_index.h"
#include "attention/cuda/problem.h"
#include "minference/attention.h"
#include "minference/error.h"
#include "minference/guard.h"
#include "minference/method.h"
#include "minference/plan.h"

namespace minference::test {
namespace {

using cuda::HostIndex;

// One sequence with these heads.
SparseIndex index_of(std::vector<HeadIndex> heads) {
  SparseIndex index;
  index.batch = 1;
  index.q_heads = std::ssize(heads);
  index.heads = std::move(heads);
  return index;
}

HeadIndex diagonal(std::vector<std::int64_t> columns, std::vector<OffsetRun> runs) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.columns = std::move(columns);
  head.runs = std::move(runs);
  return head;
}

TEST(CudaHostIndex, HeadsStandOneBehindTheOther) {
  HeadIndex blocks;
  blocks.kind = HeadIndex::Kind::kBlock;
  blocks.block_begin = {0, 1, 3};
  blocks.block_ids = {0, 0, 1};
  HeadIndex strided = diagonal({5}, {{0, 64, 1}, {100, 200, 7}});
  strided.rounding = RunRounding::kNone;
  const HostIndex host(index_of({diagonal({0, 3, 9}, {{0, 10, 1}}), HeadIndex(), blocks, strided}),
                       128);
  ASSERT_EQ(host.heads.size(), 4U);
  EXPECT_EQ(host.heads[0].kind, HeadIndex::Kind::kDiagonal);
  EXPECT_EQ(host.heads[1].kind, HeadIndex::Kind::kDense);
  EXPECT_EQ(host.heads[2].kind, HeadIndex::Kind::kBlock);
  EXPECT_EQ(host.heads[0].rounding, RunRounding::kGranule);
  EXPECT_EQ(host.heads[3].rounding, RunRounding::kNone);
  EXPECT_EQ(host.heads[0].run_count, 1);
  EXPECT_EQ(host.heads[1].run_count, 0);
  ASSERT_EQ(host.heads[3].run_count, 2);
  ASSERT_EQ(host.heads[3].run_begin, 1);
  const cuda::DeviceRun& run = host.runs[2];
  EXPECT_EQ(run.begin, 100);
  EXPECT_EQ(run.end, 200);
  EXPECT_EQ(run.stride, 7);
  EXPECT_EQ(host.block_rows, (std::vector<std::int32_t>{0, 1, 3}));
  EXPECT_EQ(host.block_ids, (std::vector<std::int32_t>{0, 0, 1}));
  EXPECT_EQ(host.heads[3].block_id_begin, 3);
}

// A box of gathered columns belongs to one head.
TEST(CudaHostIndex, ColumnsOfAHeadBeginAtAWholeBox) {
  std::vector<std::int64_t> many(cuda::kBoxKeys + 1);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int64_t>(2 * i);
  const HostIndex host(index_of({diagonal(many, {}), diagonal({}, {}), diagonal({7}, {})}), 64);
  EXPECT_EQ(host.heads[0].column_begin, 0);
  EXPECT_EQ(host.heads[0].column_count, cuda::kBoxKeys + 1);
  EXPECT_EQ(host.heads[1].column_count, 0);
  EXPECT_EQ(host.heads[2].column_begin, 2 * cuda::kBoxKeys);
  EXPECT_EQ(host.heads[2].column_count, 1);
  EXPECT_EQ(host.columns.size(), 3U * cuda::kBoxKeys);
  EXPECT_EQ(host.columns[cuda::kBoxKeys], 2 * cuda::kBoxKeys);
  EXPECT_EQ(host.columns[2 * cuda::kBoxKeys], 7);
}

// Methods give "everything" as 10^9 and more; positions on the device have 32 bits.
TEST(CudaHostIndex, ValuesBeyondEveryPositionAreCut) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  HeadIndex head = diagonal({}, {{3, kHuge, 1}, {kHuge + 1, kHuge + 2, 1}});
  head.dense_last_rows = kHuge;
  const HostIndex host(index_of({head, diagonal({}, {{0, kHuge, kHuge}})}), 500);
  EXPECT_EQ(host.heads[0].dense_last_rows, 500);
  ASSERT_EQ(host.heads[0].run_count, 1);  // the second begins behind every key
  EXPECT_EQ(host.runs[0].end, cuda::kMaxPosition);
  EXPECT_EQ(host.runs[1].stride, cuda::kMaxPosition);
}

// The library is looked for at a path of the test's own.
class CudaLibrary : public testing::Test {
 protected:
  static void use(const char* path) { setenv("MINFERENCE_CUDA_LIBRARY", path, 1); }
  void TearDown() override { unsetenv("MINFERENCE_CUDA_LIBRARY"); }

  // Memory of the host that says of itself that it is the device's: nothing may read it.
  AttentionInput input() {
    const Device device{Device::Kind::kCuda, 0};
    AttentionInput input;
    input.q = TensorView::contiguous(memory_.data(), DType::kBF16, {1, 4, 2, 8}, device);
    input.k = TensorView::contiguous(memory_.data(), DType::kBF16, {1, 4, 1, 8}, device);
    input.v = input.k;
    return input;
  }
  AttentionOutput output() { return {input().q, {}}; }

 private:
  std::vector<std::uint16_t> memory_ = std::vector<std::uint16_t>(64);
};

// Calls `call` and returns the message of the Unsupported that it throws.
template <class Call>
std::string unsupported(Call&& call) {
  try {
    call();
  } catch (const Unsupported& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "not Unsupported but: " << e.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST_F(CudaLibrary, MissingFileIsNamedByEveryCall) {
  use("/missing/cuda.so");
  const std::string expected = "no CUDA kernels: /missing/cuda.so: cannot open";
  EXPECT_EQ(unsupported([] { cuda_devices(); }).find(expected), 0U);
  const auto call = [&](auto&&... how) {
    return unsupported([&] { attention(input(), {}, output(), how...); });
  };
  EXPECT_EQ(call().find(expected), 0U);
  const SparseIndex index = index_of({diagonal({0}, {{0, 2, 1}}), HeadIndex()});
  EXPECT_EQ(call(&index).find(expected), 0U);
  // By an index that positions alone decide, and by a recipe that the device follows.
  for (const char* name :
       {"a_shape", "vertical_slash", "static", "flexprefill", "xattention", "auto"}) {
    EXPECT_EQ(call(find_method(name), MethodOptions(), MethodContext()).find(expected), 0U) << name;
    const auto plan = [&] { plan_attention(input(), {}, find_method(name), {}, {}); };
    EXPECT_EQ(unsupported(plan).find(expected), 0U) << name;
  }
  const auto recall = [&] { mass_recall(input(), {}, index, 4); };
  EXPECT_EQ(unsupported(recall).find(expected), 0U);
}

TEST_F(CudaLibrary, GuardsAreCheckedFirst) {
  use("/missing/cuda.so");
  MethodContext context;
  for (const auto& [rows, least] : {std::pair{0, 0.9}, {65, 0.9}, {16, -0.1}, {16, 1.1}}) {
    context.guard = {GuardMode::kReport, rows, least};
    EXPECT_THROW(attention(input(), {}, output(), find_method("a_shape"), {}, context),
                 InvalidArgument);
  }
  context.guard = {};
  context.on_index = [](const SparseIndex&) {};
  const std::string reason =
      unsupported([&] { attention(input(), {}, output(), find_method("a_shape"), {}, context); });
  EXPECT_EQ(reason, "on_index works on the CPU only; tensors are on cuda:0");
}

TEST_F(CudaLibrary, GuardsAreCheckedWhereNothingIsLeftOut) {
  use("/missing/cuda.so");
  AttentionParams params;
  params.causal = false;
  MethodContext context;
  context.guard = {GuardMode::kReport, 16, 7};
  EXPECT_THROW(attention(input(), params, output(), find_method("a_shape"), {}, context),
               InvalidArgument);
  context = {};
  context.on_index = [](const SparseIndex&) {};
  EXPECT_EQ(unsupported(
                [&] { attention(input(), params, output(), find_method("a_shape"), {}, context); }),
            "on_index works on the CPU only; tensors are on cuda:0");
}

TEST_F(CudaLibrary, PrecisionIsNeverLowered) {
  use("/missing/cuda.so");
  AttentionParams params;
  params.precision = Precision::kF32;
  const std::string reason =
      "precision is f32 and q is bf16; legal on cuda:0: f32 tensors, or precision auto";
  EXPECT_EQ(unsupported([&] { attention(input(), params, output()); }), reason);
  EXPECT_EQ(unsupported([&] { plan_attention(input(), params, find_method("auto"), {}, {}); }),
            reason);
}

// Of tensors on a device, which a recipe does not look at.
class CudaRecipe : public testing::Test {
 protected:
  std::optional<IndexRecipe> recipe(const MethodOptions& options,
                                    const std::vector<std::span<const Segment>>& segments) const {
    const Device device{Device::Kind::kCuda, 0};
    AttentionInput input;
    input.q = TensorView::contiguous(nullptr, DType::kBF16, {2, 300, 3, 8}, device);
    input.k = TensorView::contiguous(nullptr, DType::kBF16, {2, 1000, 1, 8}, device);
    input.v = input.k;
    const Method& method = find_method("mminference");
    MethodContext context;
    context.segments = segments;
    return method.recipe(input, {}, resolve_options(method, options), context);
  }
};

TEST_F(CudaRecipe, MminferenceOfTextAloneIsVerticalSlash) {
  const std::vector<Segment> behind = {{990, 995, Modality::kText, 0}};
  for (const auto& segments :
       {std::vector<std::span<const Segment>>(), {{}, {}}, {{}, std::span(behind)}}) {
    const auto found = recipe({{"vertical_size", 70}, {"slash_size", 200}}, segments);
    ASSERT_TRUE(found.has_value());
    ASSERT_EQ(found->patterns.size(), 3U);
    EXPECT_EQ(found->patterns[2].kind, HeadPattern::Kind::kVerticalSlash);
    EXPECT_EQ(found->patterns[2].vertical, 70);
    EXPECT_EQ(found->patterns[2].slash, 200);
  }
}

TEST_F(CudaRecipe, MminferenceSaysWhichRowsAreSampled) {
  const std::vector<Segment> video = {{100, 700, Modality::kVisual, 50},
                                      {800, 940, Modality::kVisual, 0}};
  const auto found =
      recipe({{"vertical_size", 70}, {"slash_size", 200}, {"n_init", 30}, {"min_stride", 10}},
             {{}, std::span(video)});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->kind, IndexRecipe::Kind::kModalities);
  ASSERT_EQ(found->sequences.size(), 2U);
  EXPECT_TRUE(found->sequences[0].vertical_slash);
  const ModalitySequence& sequence = found->sequences[1];
  EXPECT_FALSE(sequence.dense);
  EXPECT_FALSE(sequence.vertical_slash);
  EXPECT_EQ(sequence.q_len, 300);
  EXPECT_EQ(sequence.kv_len, 1000);
  // The last 64 rows are those of text and visual ones: samples 0, 2 and 1.
  ASSERT_EQ(sequence.samples.size(), 3U);
  const auto position = [](std::int64_t row) { return 700 + row; };
  const auto& of_text = sequence.samples[*sequence.text_rows];
  EXPECT_EQ(position(of_text.begin), 940);
  EXPECT_EQ(position(of_text.end), 1000);
  const auto& of_visual = sequence.samples[*sequence.visual_rows];
  EXPECT_EQ(position(of_visual.begin), 876);
  EXPECT_EQ(position(of_visual.end), 940);
  const auto& last = sequence.samples[*sequence.last_rows];
  EXPECT_EQ(position(last.begin), 936);
  EXPECT_EQ(sequence.initial_keys, 100);
  ASSERT_EQ(sequence.grids.size(), 2U);
  EXPECT_EQ(sequence.grids[0].region.begin, 100);
  EXPECT_EQ(sequence.grids[0].region.end, 700);
  EXPECT_EQ(sequence.grids[0].first_stride, 50);
  EXPECT_EQ(sequence.grids[0].last_stride, 50);
  // The local window and what four periods do not fit.
  EXPECT_EQ(sequence.grids[1].region.begin, 800);
  EXPECT_EQ(sequence.grids[1].region.end, 777);
  EXPECT_LT(sequence.grids[1].last_stride, sequence.grids[1].first_stride);
}

TEST_F(CudaRecipe, BudgetsThatKeepEverythingAreDense) {
  const std::vector<Segment> video = {{100, 700, Modality::kVisual, 50}};
  const std::vector<std::span<const Segment>> segments = {{}, std::span(video)};
  EXPECT_TRUE(recipe({{"slash_size", 1000}}, segments)->sequences[1].dense);
  EXPECT_FALSE(recipe({{"slash_size", 999}, {"vertical_size", 9}}, segments)->sequences[1].dense);
  // Rows of text in a chunk without visual ones see all of a grid.
  EXPECT_TRUE(recipe({{"kind", 1}}, segments)->sequences[1].dense);
}

TEST_F(CudaRecipe, BadSegmentsAreRefused) {
  const std::vector<Segment> behind = {{990, 1001, Modality::kVisual, 0}};
  const std::vector<Segment> overlapping = {{5, 9, Modality::kVisual, 0},
                                            {8, 20, Modality::kVisual, 0}};
  EXPECT_THROW(recipe({}, {{}, std::span(behind)}), InvalidArgument);
  EXPECT_THROW(recipe({}, {std::span(overlapping), {}}), InvalidArgument);
  EXPECT_THROW(recipe({}, {{}, {}, {}}), InvalidArgument);
}

// No estimate of an earlier chunk is kept there.
TEST_F(CudaLibrary, StaticTakesFirstChunksOnly) {
  use("/missing/cuda.so");
  AttentionInput later = input();
  later.q.shape[1] = 1;
  AttentionOutput output;
  output.out = later.q;
  EXPECT_EQ(unsupported([&] { attention(later, {}, output, find_method("static"), {}, {}); }),
            "method static got rows from position 3 of sequence 0 on; legal on cuda:0, where no "
            "estimate is kept: chunks from position 0");
}

TEST_F(CudaLibrary, ForeignLibraryIsRefused) {
  use("libm.so.6");
  EXPECT_EQ(unsupported([] { cuda_devices(); }), "no CUDA kernels: libm.so.6 is another library");
}

// As if the variable were not set: what is found then depends on the build and the machine.
TEST_F(CudaLibrary, EmptyPathIsNone) {
  use("");
  try {
    cuda_devices();
  } catch (const Unsupported& e) {
    EXPECT_EQ(std::string(e.what()).find("another library"), std::string::npos) << e.what();
  }
}

// The library of this build, on a machine without a device; with one, bench/cuda_check.sh tests it.
TEST_F(CudaLibrary, NoDeviceIsOneSentence) {
  const std::string library = MINFERENCE_TEST_BIN_DIR "/libminference_cuda.so";
  if (!std::filesystem::exists(library)) GTEST_SKIP() << "built without CUDA";
  use(library.c_str());
  try {
    if (!cuda_devices().empty()) GTEST_SKIP() << "this machine has a device";
  } catch (const Unsupported& e) {
    EXPECT_EQ(std::string(e.what()).find("no CUDA device: "), 0U) << e.what();
  }
  const std::string reason = unsupported([&] { attention(input(), {}, output()); });
  EXPECT_EQ(reason.find("no CUDA device: "), 0U) << reason;
  EXPECT_EQ(reason.find('\n'), std::string::npos) << reason;
}

TEST_F(CudaLibrary, MixedDevicesAreRefusedByName) {
  use("/missing/cuda.so");
  const auto refused = [&](auto&& change) {
    AttentionInput in = input();
    AttentionOutput out = output();
    change(in, out);
    try {
      attention(in, {}, out);
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(refused([](AttentionInput& in, AttentionOutput&) { in.k.device = {}; }),
            "k is on device cpu; legal: that of q, cuda:0");
  EXPECT_EQ(refused([](AttentionInput& in, AttentionOutput&) { in.v.device.ordinal = 1; }),
            "v is on device cuda:1; legal: that of q, cuda:0");
  EXPECT_EQ(refused([](AttentionInput&, AttentionOutput& out) { out.out.device = {}; }),
            "out is on device cpu; legal: that of q, cuda:0");
  EXPECT_EQ(refused([](AttentionInput& in, AttentionOutput&) { in.q.device = {}; }),
            "k is on device cuda:0; legal: that of q, cpu");
}

}  // namespace
}  // namespace minference::test

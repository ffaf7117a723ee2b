// The guard's kernels against fp64 over the explicit mask. Needs a GPU: bench/cuda_check.sh.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/device_problem.h"
#include "guard/cuda/recall.h"
#include "minference/guard.h"
#include "support/recall_oracle.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

struct Measured {
  std::vector<float> recall;
  std::vector<cuda::DeviceHead> before;
  std::vector<cuda::DeviceHead> guarded;
};

Measured measure(const Problem& problem, const RowSample& sample, float least) {
  const DeviceProblem device(problem.input(), problem.params, {}, problem.index());
  const cuda::Problem& on_device = device.problem();
  const auto heads = static_cast<std::int64_t>(on_device.batch) * on_device.q_heads;
  const auto head_bytes = heads * static_cast<std::int64_t>(sizeof(cuda::DeviceHead));
  const auto recall_bytes = heads * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t bytes = cuda::recall_bytes(on_device, sample);
  const DeviceBuffer workspace(bytes);
  const DeviceBuffer recall(recall_bytes);
  const DeviceBuffer guarded(head_bytes);
  check_cuda(cudaMemset(workspace.data(), 0xFF, bytes), "cudaMemset");
  cuda::measure_recall(
      on_device, device.index(), sample, least, reinterpret_cast<float*>(recall.data()),
      reinterpret_cast<cuda::DeviceHead*>(guarded.data()), {workspace.data(), bytes}, nullptr);
  check_cuda(cudaDeviceSynchronize(), "measure_recall");
  Measured measured;
  measured.recall.resize(heads);
  measured.before.resize(heads);
  measured.guarded.resize(heads);
  recall.download(measured.recall.data(), recall_bytes);
  guarded.download(measured.guarded.data(), head_bytes);
  check_cuda(
      cudaMemcpy(measured.before.data(), device.index().heads, head_bytes, cudaMemcpyDeviceToHost),
      "copy from the device");
  return measured;
}

// f32 is rounded to bf16 before it is multiplied.
void expect_exact(Case c, DType dtype, const RowSample& sample) {
  c.q_dtype = c.kv_dtype = dtype;
  SCOPED_TRACE(describe(c) + ", sampled rows " + std::to_string(sample.rows));
  const Problem problem = make_problem(c);
  const std::vector<double> expected = exact_recall(problem, sample);
  const Measured measured = measure(problem, sample, 0.5F);
  ASSERT_EQ(measured.recall.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const float recall = measured.recall[i];
    EXPECT_NEAR(recall, expected[i], dtype == DType::kF32 ? 0.02 : 2e-4) << "head " << i;
    const cuda::DeviceHead& before = measured.before[i];
    const cuda::DeviceHead& after = measured.guarded[i];
    EXPECT_EQ(after.kind, recall < 0.5F ? HeadIndex::Kind::kDense : before.kind) << "head " << i;
    if (recall < 0.5F) continue;
    EXPECT_EQ(after.column_begin, before.column_begin);
    EXPECT_EQ(after.column_count, before.column_count);
    EXPECT_EQ(after.dense_last_rows, before.dense_last_rows);
  }
}

constexpr Pattern kPatterns[] = {Pattern::kDenseHeads, Pattern::kAShape,    Pattern::kUnionRuns,
                                 Pattern::kBoxRuns,    Pattern::kExactRuns, Pattern::kStridedRuns,
                                 Pattern::kBlocks,     Pattern::kMixed};
constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

TEST(CudaGuard, EveryFormOfIndex) {
  for (const Pattern pattern : kPatterns) {
    for (const DType dtype : kTypes) {
      Case c = six_heads(pattern);
      c.q_len = 60;
      c.extra = 200;
      expect_exact(c, dtype, {60, 1});
      c.q_len = 777;
      c.extra = 900;
      expect_exact(c, dtype, {16, 1});
      expect_exact(c, dtype, {16, kGuardRowsPerSample});
      expect_exact(c, dtype, {kMaxGuardRows, 1});
      c.extra = 0;
      expect_exact(c, dtype, {1, 1});
    }
  }
}

// Chunks of keys and tiles of slots: more than one of each, and groups that leave slots empty.
TEST(CudaGuard, ManyKeysAndGroups) {
  for (const auto& [q_heads, kv_heads] : {std::pair{7, 1}, {8, 2}, {4, 4}}) {
    for (const Pattern pattern : {Pattern::kBoxRuns, Pattern::kBlocks, Pattern::kExactRuns}) {
      Case c;
      c.pattern = pattern;
      c.q_heads = q_heads;
      c.kv_heads = kv_heads;
      c.q_len = 300;
      c.extra = 9000;
      expect_exact(c, DType::kBF16, {16, 1});
      c.budget = Budget::kMoreThanAll;
      expect_exact(c, DType::kBF16, {5, 1});
    }
  }
}

TEST(CudaGuard, HeadDimsAndStorage) {
  for (const std::int64_t dim : {8, 40, 64, 96, 100, 128, 192, 256}) {
    for (const Layout layout : {Layout::kPacked, Layout::kPaddedRows, Layout::kHeadMajor}) {
      Case c = six_heads(Pattern::kBoxRuns);
      c.dim = dim;
      c.layout = layout;
      c.q_len = 200;
      for (const DType dtype : kTypes) expect_exact(c, dtype, {16, 1});
    }
  }
}

TEST(CudaGuard, BatchesPagesAndRowsThatSeeNothing) {
  for (const Pattern pattern : {Pattern::kExactRuns, Pattern::kBlocks, Pattern::kUnionRuns}) {
    Case c = six_heads(pattern);
    c.batch = 3;
    c.q_len = 150;
    c.dense_last_rows = 7;
    for (const Lengths lengths : {Lengths::kRagged, Lengths::kSomeEmpty}) {
      c.lengths = lengths;
      for (const int page_size : {0, 16, 48}) {
        c.page_size = page_size;
        expect_exact(c, DType::kBF16, {16, 1});
      }
    }
    c.page_size = 0;
    c.lengths = Lengths::kFull;
    for (const int extra : {-20, -150, -151}) {
      c.extra = extra;
      expect_exact(c, DType::kBF16, {50, 1});
    }
  }
}

TEST(CudaGuard, ModifiersAndMasks) {
  for (const Pattern pattern : {Pattern::kUnionRuns, Pattern::kBlocks, Pattern::kStridedRuns}) {
    Case c = six_heads(pattern);
    c.q_len = 150;
    c.extra = 400;
    c.soft_cap = 3;
    expect_exact(c, DType::kBF16, {16, 1});
    c.window = 70;
    expect_exact(c, DType::kF16, {16, 1});
    c.soft_cap = 0;
    c.window = 300;
    c.scale = -0.2F;
    expect_exact(c, DType::kBF16, {16, 1});
    c.window = 0;
    c.mask = MaskKind::kRandom;
    expect_exact(c, DType::kBF16, {16, 1});
  }
}

// What the walk of a whole tile covers is what the walks of its clipped parts cover: with equal weights
// recall counts keys.
TEST(CudaGuard, CountsKeys) {
  std::size_t seen = 0;
  for (Case c : pattern_cases()) {
    if (c.pattern == Pattern::kNone || seen++ % sweep_stride() != 0) continue;
    c.values = Values::kExact;
    expect_exact(c, DType::kBF16, {16, 1});
  }
}

}  // namespace
}  // namespace minference::test

// Both executors against the fp64 reference, over the shared sweep. Needs a GPU: bench/cuda_check.sh.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <tuple>

#include "attention/cuda/sm80_attention.h"
#include "attention/cuda/sm90_attention.h"
#include "cuda/device_problem.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

// kSm90Apart: dense heads of an index in the kernel of their own.
enum class Executor { kSm80, kSm90, kSm90Apart };

void run_sm80(const cuda::Problem& problem, const cuda::DeviceIndex& index) {
  DeviceBuffer tickets(cuda::kTickets * sizeof(int));
  cuda::sm80_attention(problem, index, reinterpret_cast<int*>(tickets.data()), nullptr);
  check_cuda(cudaDeviceSynchronize(), "sm80_attention");
}

void run_sm90(const cuda::Problem& problem, const cuda::DeviceIndex& index) {
  DeviceBuffer tickets(cuda::kTickets * sizeof(int));
  DeviceBuffer columns(cuda::GatheredColumns::bytes(problem, index));
  cuda::GatheredColumns gathered;
  gathered.keys = columns.data();
  gathered.values = columns.data() + index.column_capacity * problem.dim * 2;
  if (index.column_capacity > 0) cuda::gather_columns(problem, index, gathered, nullptr);
  cuda::sm90_attention(problem, index, gathered, reinterpret_cast<int*>(tickets.data()), nullptr);
  check_cuda(cudaDeviceSynchronize(), "sm90_attention");
}

void run_sm90_apart(const cuda::Problem& problem, const cuda::DeviceIndex& index) {
  cuda::DeviceIndex apart = index;
  apart.dense_apart = index.heads != nullptr;
  run_sm90(problem, apart);
}

bool device_has_sm90() {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major == 9;
}

// The cases as they are (most of them in f32), and with inputs of both 16-bit types.
enum class Inputs { kAsTheyAre, kBF16, kF16 };

class Sweep : public testing::TestWithParam<std::tuple<Executor, Inputs>> {
 protected:
  void SetUp() override {
    if (executor() != Executor::kSm80 && !device_has_sm90()) GTEST_SKIP() << "no Hopper GPU";
  }

  static Executor executor() { return std::get<0>(GetParam()); }
  static Inputs inputs() { return std::get<1>(GetParam()); }

  static Case adapted(Case c) {
    if (inputs() != Inputs::kAsTheyAre) {
      c.q_dtype = c.kv_dtype = inputs() == Inputs::kF16 ? DType::kF16 : DType::kBF16;
    }
    return c;
  }

  static Stats run(const AttentionInput& input, const AttentionParams& params,
                   const AttentionOutput& output, const SparseIndex* index, IsaLevel level) {
    const auto launch = executor() == Executor::kSm80   ? run_sm80
                        : executor() == Executor::kSm90 ? run_sm90
                                                        : run_sm90_apart;
    return run_on_device(launch, input, params, output, index, level);
  }

  // The level of the CPU that rounds as the kernels do.
  static IsaLevel level_of(const Case& c) {
    const bool f32 = c.q_dtype == DType::kF32 && c.kv_dtype == DType::kF32;
    return f32 ? IsaLevel::kGeneric : IsaLevel::kAvx512Bf16;
  }

  static void sweep(const std::vector<Case>& cases) {
    std::size_t taken = 0;
    std::size_t seen = 0;
    for (std::size_t i = 0; i < cases.size(); i += sweep_stride(), ++seen) {
      const Case c = adapted(cases[i]);
      if (executor() != Executor::kSm80) {
        const Problem problem = make_problem(c);
        const DeviceProblem device(problem.input(), problem.params, {}, nullptr);
        if (!cuda::sm90_takes(device.problem())) continue;
      }
      ++taken;
      expect_matches_reference(c, run, {level_of(c)});
    }
    std::printf("%zu of %zu cases are this executor's\n", taken, seen);
  }
};

TEST_P(Sweep, Shapes) { sweep(shape_cases()); }
TEST_P(Sweep, ManyKeys) { sweep(long_cases()); }
TEST_P(Sweep, Storage) { sweep(storage_cases()); }
TEST_P(Sweep, Values) { sweep(value_cases()); }
TEST_P(Sweep, Patterns) { sweep(pattern_cases()); }
TEST_P(Sweep, Features) { sweep(feature_cases()); }
TEST_P(Sweep, RandomFirst) { sweep(random_cases(150, 20240702)); }
TEST_P(Sweep, RandomSecond) { sweep(random_cases(150, 20250811)); }

TEST_P(Sweep, PatternsOfLargeHeads) {
  std::vector<Case> cases;
  const std::vector<Case> all = pattern_cases();
  for (std::size_t i = 0; i < all.size(); i += 7) {
    cases.push_back(all[i]);
    cases.back().dim = cases.back().v_dim = 256;
  }
  sweep(cases);
}

// Large heads leave the pipeline two stages: the first row block then multiplies also a box of which it
// sees nothing, here that of the columns.
TEST_P(Sweep, ColumnsThatOneRowBlockSees) {
  for (const std::int64_t dim : {64, 128, 192, 256}) {
    Case c;
    c.q_len = 128;
    c.extra = 1000;
    c.q_heads = c.kv_heads = 1;
    c.dim = c.v_dim = dim;
    c.values = Values::kExact;
    c = adapted(c);
    HeadIndex head;
    head.kind = HeadIndex::Kind::kDiagonal;
    head.rounding = RunRounding::kBox;
    head.runs = {{500, 501, 1}};
    for (std::int64_t key = c.extra + 64; key < c.extra + 128; ++key) head.columns.push_back(key);
    Problem problem = make_problem(c);
    problem.sparse = SparseIndex{1, 1, {head}};
    expect_matches_reference(c, problem, run, {level_of(c)});
  }
}

// A value that is not finite reaches the rows that see its key, and no other.
TEST_P(Sweep, NonFiniteRowsStayAlone) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value : {kNaN, kInfinity}) {
    for (const bool in_values : {false, true}) {
      Case c;
      c.q_len = 300;
      c = adapted(c);
      Problem problem = make_problem(c);
      (in_values ? problem.v : problem.k).set(0, 200, 1, 5, value);
      problem.q.set(0, 7, 0, 3, kNaN);
      Result result = make_result(problem.input(), c.out_dtype, c.layout);
      run(problem.input(), problem.params, result.output(), nullptr, IsaLevel::kGeneric);
      for (std::int64_t row = 0; row < c.q_len; ++row) {
        for (std::int64_t h = 0; h < c.q_heads; ++h) {
          const bool sees = h / (c.q_heads / c.kv_heads) == 1 && row + c.extra >= 200;
          const bool own = row == 7 && h == 0;
          bool finite = true;
          for (std::int64_t d = 0; d < c.v_dim; ++d) {
            finite = finite && std::isfinite(result.out.get(0, row, h, d));
          }
          // An infinite key makes a score of +inf or -inf, and only the former shows.
          if (sees && !in_values && value == kInfinity) continue;
          ASSERT_EQ(finite, !sees && !own) << "row " << row << ", head " << h << ", value " << value
                                           << (in_values ? " in v" : " in k");
        }
      }
    }
  }
}

std::string sweep_name(const testing::TestParamInfo<std::tuple<Executor, Inputs>>& info) {
  const auto [executor, inputs] = info.param;
  constexpr const char* kNames[] = {"Sm80", "Sm90", "Sm90Apart"};
  return std::string(kNames[static_cast<int>(executor)]) +
         (inputs == Inputs::kAsTheyAre ? "AsTheyAre" : (inputs == Inputs::kBF16 ? "BF16" : "F16"));
}

INSTANTIATE_TEST_SUITE_P(Sm80, Sweep,
                         testing::Combine(testing::Values(Executor::kSm80),
                                          testing::Values(Inputs::kAsTheyAre, Inputs::kBF16,
                                                          Inputs::kF16)),
                         sweep_name);
INSTANTIATE_TEST_SUITE_P(Sm90, Sweep,
                         testing::Combine(testing::Values(Executor::kSm90, Executor::kSm90Apart),
                                          testing::Values(Inputs::kBF16, Inputs::kF16)),
                         sweep_name);

}  // namespace
}  // namespace minference::test

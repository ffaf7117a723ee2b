// The sm_90a executor against the fp64 reference, over the shared sweep.
#include <gtest/gtest.h>

#include "attention/cuda/sm90_attention.h"
#include "cuda/device_problem.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

void run_sm90(const cuda::Problem& problem, const cuda::DeviceIndex& index) {
  DeviceBuffer columns(cuda::GatheredColumns::bytes(problem, index));
  DeviceBuffer ticket(sizeof(int));
  cuda::GatheredColumns gathered;
  gathered.keys = columns.data();
  gathered.values = columns.data() + index.column_capacity * problem.dim * 2;
  if (index.column_capacity > 0) cuda::gather_columns(problem, index, gathered, nullptr);
  cuda::sm90_attention(problem, index, gathered, reinterpret_cast<int*>(ticket.data()), nullptr);
  check_cuda(cudaDeviceSynchronize(), "sm_90a attention");
}

// Cases whose inputs are f32 are run with bf16 ones; those that the executor does not take are the
// sm_80 executor's, and counted.
void sweep(const std::vector<Case>& cases) {
  int taken = 0;
  for (Case c : cases) {
    if (c.q_dtype == DType::kF32) c.q_dtype = c.kv_dtype == DType::kF32 ? DType::kBF16 : c.kv_dtype;
    c.kv_dtype = c.q_dtype;
    c.page_size = 0;
    const Problem probe = make_problem(c);
    const DeviceProblem device(probe.input(), probe.params, {}, nullptr);
    if (!cuda::sm90_takes(device.problem())) continue;
    ++taken;
    const Runner run = [](const AttentionInput& input, const AttentionParams& params,
                          const AttentionOutput& output, const SparseIndex* index,
                          IsaLevel level) {
      return run_on_device(run_sm90, input, params, output, index, level);
    };
    expect_matches_reference(c, run, {owed_level(probe.input())});
    if (testing::Test::HasFailure()) break;
  }
  std::printf("%d of %d cases are sm_90a's\n", taken, static_cast<int>(cases.size()));
}

TEST(Sm90Oracle, Shapes) { sweep(shape_cases()); }
TEST(Sm90Oracle, Storage) { sweep(storage_cases()); }
TEST(Sm90Oracle, Values) { sweep(value_cases()); }
TEST(Sm90Oracle, Patterns) { sweep(pattern_cases()); }
TEST(Sm90Oracle, Features) { sweep(feature_cases()); }
TEST(Sm90Oracle, Random) { sweep(random_cases(300, 20240702)); }

}  // namespace
}  // namespace minference::test

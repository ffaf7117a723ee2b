// The public calls with tensors on a device: guard, plans, streams and graphs, against the same calls on
// the CPU. Needs a GPU and the library: bench/cuda_check.sh.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/reference/reference.h"
#include "cuda/device_problem.h"
#include "minference/error.h"
#include "minference/guard.h"
#include "minference/plan.h"
#include "support/problem.h"
#include "support/sweep.h"

namespace minference::test {
namespace {

// The values of a result. Rows beyond a sequence are poison, which compares equal here.
std::vector<float> comparable(std::vector<float> values) {
  for (float& value : values) value = std::isnan(value) ? -1e30F : value;
  return values;
}

// One call with its tensors on the device and, for comparison, on the host.
class Call {
 public:
  explicit Call(const Case& c)
      : host(make_problem(c)),
        result_(make_result(host.input(), DType::kF32, Layout::kPacked)),
        device_(host.input(), host.params, result_.output(), nullptr) {}

  AttentionInput input() const {
    AttentionInput input = host.input();
    input.q = on_device(input.q, device_.problem().q);
    input.k = on_device(input.k, device_.problem().k);
    input.v = on_device(input.v, device_.problem().v);
    return input;
  }
  AttentionOutput output() const {
    return {on_device(result_.output().out, device_.problem().out), {}};
  }
  // What the device wrote.
  std::vector<float> values() {
    device_.download();
    return comparable(result_.out.values());
  }

  Problem host;

 private:
  static TensorView on_device(TensorView view, const cuda::DeviceTensor& tensor) {
    view.data = tensor.data;
    view.device = {Device::Kind::kCuda, 0};
    return view;
  }

  Result result_;
  DeviceProblem device_;
};

// Fewer heads, and repetitions, where a tool follows every access to memory.
bool is_followed() { return sweep_stride() > 1; }

Case prompt() {
  Case c;
  c.q_dtype = c.kv_dtype = DType::kBF16;
  c.batch = 2;
  c.lengths = Lengths::kRagged;
  c.q_len = 2000;
  c.extra = 300;
  c.q_heads = is_followed() ? 2 : 8;
  return c;
}

std::int64_t heads_of_prompt() { return prompt().batch * prompt().q_heads; }

struct Choice {
  const char* method;
  MethodOptions options;
};
const Choice kChoices[] = {{"a_shape", {{"n_init", 16}, {"n_local", 200}}},
                           {"vertical_slash", {{"vertical_size", 40}, {"slash_size", 120}}},
                           {"block_sparse", {{"top_k", 4}}}};

class CudaCall : public testing::Test {
 protected:
  void SetUp() override {
    const auto own = std::filesystem::canonical("/proc/self/exe").parent_path();
    const std::string library = own / "../../bin/libminference_cuda.so";
    setenv("MINFERENCE_CUDA_LIBRARY", library.c_str(), 0);
  }

  static Stats attend(const Call& call, const Choice& choice, const AttentionParams& params,
                      const MethodContext& context = {}) {
    return attention(call.input(), params, call.output(), find_method(choice.method),
                     choice.options, context);
  }
};

TEST_F(CudaCall, RecallIsThatOfTheCpu) {
  for (const Pattern pattern : {Pattern::kBoxRuns, Pattern::kBlocks, Pattern::kStridedRuns}) {
    Case c = prompt();
    c.pattern = pattern;
    const Call call(c);
    const std::vector<double> expected =
        mass_recall(call.host.input(), call.host.params, *call.host.index(), 16);
    const std::vector<double> recall =
        mass_recall(call.input(), call.host.params, *call.host.index(), 16);
    ASSERT_EQ(recall.size(), expected.size());
    for (std::size_t i = 0; i < recall.size(); ++i) EXPECT_NEAR(recall[i], expected[i], 5e-3) << i;
  }
}

TEST_F(CudaCall, GuardReportsAndEnforces) {
  for (const Choice& choice : kChoices) {
    SCOPED_TRACE(choice.method);
    Call call(prompt());
    AttentionParams params;
    params.measure = true;
    const Stats off = attend(call, choice, params);
    EXPECT_EQ(off.recall_count, 0);
    EXPECT_TRUE(off.cuda_kernels == 80 || off.cuda_kernels == 90);
    ASSERT_LT(off.kept_pairs, off.causal_pairs);

    MethodContext context;
    context.guard = {GuardMode::kReport, 16, 0.9};
    const Stats report = attend(call, choice, params, context);
    EXPECT_EQ(report.recall_count, heads_of_prompt());
    EXPECT_GT(report.guard_seconds, 0);
    EXPECT_EQ(report.kept_pairs, off.kept_pairs);
    EXPECT_TRUE(report.fallbacks.empty());
    const double mean = report.mass_recall();
    EXPECT_GT(mean, 0.0);
    EXPECT_LT(mean, 1.0);
    if (std::string(choice.method) == "a_shape") {  // the same index on both
      const SparseIndex index = find_method("a_shape").build_index(
          call.host.input(), {}, resolve_options(find_method("a_shape"), choice.options), {});
      SparseIndex copy = index;
      Stats expected;
      guard(call.host.input(), {}, context.guard, copy, expected);
      EXPECT_NEAR(mean, expected.mass_recall(), 5e-3);
    }

    // Between the lowest and the highest, some heads become dense.
    context.guard = {GuardMode::kEnforce, 16, mean};
    const Stats enforced = attend(call, choice, params, context);
    const std::vector<float> measured = call.values();
    ASSERT_EQ(enforced.fallbacks.size(), 1U);
    const std::int64_t replaced = enforced.fallbacks.begin()->second;
    EXPECT_GT(replaced, 0);
    EXPECT_LT(replaced, heads_of_prompt());
    EXPECT_GT(enforced.kept_pairs, off.kept_pairs);
    EXPECT_LE(enforced.kept_pairs, off.causal_pairs);
    EXPECT_GE(enforced.mass_recall(), mean);

    // Nobody has to wait for it.
    params.measure = false;
    const Stats quick = attend(call, choice, params, context);
    EXPECT_EQ(quick.recall_count, 0);
    EXPECT_EQ(call.values(), measured);

    params.measure = true;
    context.guard.min_recall = 1.0;
    const Stats all = attend(call, choice, params, context);
    EXPECT_EQ(all.kept_pairs, all.causal_pairs);
    EXPECT_EQ(all.mass_recall(), 1.0);
    const std::vector<float> exact = call.values();
    attend(call, {"dense", {}}, params);
    const std::vector<float> dense = call.values();
    ASSERT_EQ(exact.size(), dense.size());
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_NEAR(exact[i], dense[i], 2e-2) << i;
    }
  }
}

TEST_F(CudaCall, BadGuardsAreRefused) {
  const Call call(prompt());
  MethodContext context;
  for (const auto& [rows, least] : {std::pair{0, 0.9}, {65, 0.9}, {16, -0.1}, {16, 1.1}}) {
    context.guard = {GuardMode::kEnforce, rows, least};
    EXPECT_THROW(attend(call, kChoices[0], {}, context), InvalidArgument) << rows << " " << least;
  }
}

TEST_F(CudaCall, PlansRunAsOftenAsWanted) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const Choice& choice : kChoices) {
    SCOPED_TRACE(choice.method);
    Call call(prompt());
    AttentionParams params;
    params.stream = stream;
    params.measure = true;
    MethodContext context;
    context.guard = {GuardMode::kEnforce, 16, 0.5};
    const Stats whole = attend(call, choice, params, context);
    const std::vector<float> expected = call.values();

    const Method& method = find_method(choice.method);
    const AttentionPlan plan =
        plan_attention(call.input(), params, method, choice.options, context);
    EXPECT_EQ(plan.stats().method, choice.method);
    EXPECT_EQ(plan.stats().recall_count, heads_of_prompt());
    EXPECT_EQ(plan.stats().fallbacks, whole.fallbacks);
    EXPECT_EQ(plan.stats().kernel_seconds, 0);
    for (int i = 0; i < 3; ++i) {
      const Stats stats = execute(plan, call.input(), call.output());
      EXPECT_EQ(stats.kept_pairs, whole.kept_pairs);
      EXPECT_EQ(stats.index_seconds, 0);
      EXPECT_EQ(call.values(), expected);
    }

    // Other tensors: their own values, the plan's keys.
    Case c = prompt();
    c.seed = 9;
    Call other(c);
    EXPECT_EQ(execute(plan, other.input(), other.output()).kept_pairs, whole.kept_pairs);
    EXPECT_NE(other.values(), expected);

    c.q_heads *= 2;
    const Call narrow(c);
    EXPECT_THROW(execute(plan, narrow.input(), narrow.output()), InvalidArgument);
    const Result result = make_result(call.host.input(), DType::kF32, Layout::kPacked);
    EXPECT_THROW(execute(plan, call.host.input(), result.output()), InvalidArgument);
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Too long for a tool that follows every access to shared memory (bench/cuda_check.sh).
using LongCudaCall = CudaCall;

// Many heads with one of keys and values: more than an index may take, which plans have nevertheless.
TEST_F(LongCudaCall, PartsOfTheHeadsAreWhatAllAtOnceAre) {
  Case c;
  c.q_dtype = c.kv_dtype = DType::kBF16;
  c.q_len = 30000;
  c.extra = 50;
  c.q_heads = 70;
  c.kv_heads = 2;
  c.dim = c.v_dim = 16;
  Call call(c);
  AttentionParams params;
  params.measure = true;
  MethodContext context;
  context.guard = {GuardMode::kEnforce, 16, 0.5};
  for (const Choice& choice :
       {Choice{"block_sparse", {{"top_k", 400}}}, Choice{"xattention", {{"block_size", 64}}}}) {
    SCOPED_TRACE(choice.method);
    const Stats whole = attend(call, choice, params, context);
    const std::vector<float> values = call.values();
    const AttentionPlan plan =
        plan_attention(call.input(), params, find_method(choice.method), choice.options, context);
    const Stats planned = execute(plan, call.input(), call.output());
    EXPECT_EQ(call.values(), values);
    EXPECT_EQ(whole.kept_pairs, planned.kept_pairs);
    EXPECT_EQ(whole.causal_pairs, planned.causal_pairs);
    EXPECT_EQ(whole.recall_count, 70);
    EXPECT_DOUBLE_EQ(whole.recall_sum, plan.stats().recall_sum);
    EXPECT_EQ(whole.fallbacks, plan.stats().fallbacks);
  }
}

// Estimates round f32 tensors to bf16; attention over what they find is of f32.
TEST_F(CudaCall, EstimatesTakeF32) {
  Case c = prompt();
  c.q_dtype = c.kv_dtype = DType::kF32;
  AttentionParams params;
  params.measure = true;
  for (const Choice& choice :
       {kChoices[1], kChoices[2], Choice{"xattention", {}}, Choice{"flexprefill", {}}}) {
    SCOPED_TRACE(choice.method);
    Call call(c);
    const Stats stats = attend(call, choice, params);
    EXPECT_TRUE(stats.fallbacks.empty());
    const Result host = make_result(call.host.input(), DType::kF32, Layout::kPacked);
    const Stats expected = attention(call.host.input(), call.host.params, host.output(),
                                     find_method(choice.method), choice.options, {});
    // Runs are of whole boxes on the device, of granules on the CPU.
    EXPECT_NEAR(stats.kept_fraction(), expected.kept_fraction(), 0.06);
  }
}

TEST_F(CudaCall, PlansAreGivenBack) {
  const Call call(prompt());
  const auto& [name, options] = kChoices[1];
  auto plan = std::make_unique<AttentionPlan>(
      plan_attention(call.input(), {}, find_method(name), options, {}));
  execute(*plan, call.input(), call.output());
  plan.reset();
  for (int i = 0; i < (is_followed() ? 2 : 20); ++i) {
    const AttentionPlan again = plan_attention(call.input(), {}, find_method(name), options, {});
    execute(again, call.input(), call.output());
  }
  check_cuda(cudaDeviceSynchronize(), "plans");
}

TEST_F(CudaCall, GraphsHoldTheGuardAndRunsOfAPlan) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const Choice& choice : kChoices) {
    SCOPED_TRACE(choice.method);
    Call call(prompt());
    AttentionParams params;
    params.stream = stream;
    MethodContext context;
    context.guard = {GuardMode::kEnforce, 16, 0.7};
    attend(call, choice, params, context);
    const std::vector<float> expected = call.values();
    const AttentionPlan plan =
        plan_attention(call.input(), params, find_method(choice.method), choice.options, context);
    for (const bool planned : {false, true}) {
      Call fresh(prompt());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      if (planned) {
        execute(plan, fresh.input(), fresh.output());
      } else {
        attend(fresh, choice, params, context);
      }
      check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
      check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
      for (int i = 0; i < 2; ++i) {
        check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
        EXPECT_EQ(fresh.values(), expected) << (planned ? "plan" : "call");
      }
      check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
      check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// A video and, behind text, a picture in each sequence of prompt().
class Segments {
 public:
  explicit Segments(const AttentionInput& input) {
    for (std::int64_t b = 0; b < input.q.batch(); ++b) {
      const std::int64_t kv_len = key_length(input, b);
      lists_.push_back({{kv_len / 8, kv_len / 2, Modality::kVisual, kv_len / 4},
                        {kv_len / 2 + 10, kv_len - 30, Modality::kVisual, kv_len / 3}});
    }
    spans_.assign(lists_.begin(), lists_.end());
  }
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  MethodContext context() const {
    MethodContext context;
    context.segments = spans_;
    return context;
  }

 private:
  std::vector<std::vector<Segment>> lists_;
  std::vector<std::span<const Segment>> spans_;
};

// Root mean square of the difference over that of the expected values.
double relative_error(const std::vector<float>& values, const std::vector<float>& expected) {
  EXPECT_EQ(values.size(), expected.size());
  double differences = 0;
  double squares = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == expected[i]) continue;  // beyond a sequence, too
    differences += (values[i] - expected[i]) * (values[i] - expected[i]);
    squares += expected[i] * expected[i];
  }
  return squares > 0 ? std::sqrt(differences / squares) : 0.0;
}

// Blocks of 3, 5 or 6 boxes do not divide the 32 that a warp makes at a time.
TEST_F(CudaCall, BlocksOfAnySizeAreWhole) {
  for (const char* name : {"xattention", "flexprefill"}) {
    for (const double block_size : {64.0, 192.0, 320.0, 384.0}) {
      SCOPED_TRACE(name + std::to_string(block_size));
      const Choice choice = {name, {{"block_size", block_size}}};
      Call call(prompt());
      AttentionParams params;
      params.measure = true;
      const Stats stats = attend(call, choice, params);
      const Result host = make_result(call.host.input(), DType::kF32, Layout::kPacked);
      const Stats expected = attention(call.host.input(), params, host.output(),
                                       find_method(choice.method), choice.options, {});
      const std::vector<float> wanted = comparable(host.out.values());
      EXPECT_NEAR(stats.kept_fraction(), expected.kept_fraction(), 0.02);
      EXPECT_LT(relative_error(call.values(), wanted), 5e-2);
    }
  }
}

TEST_F(CudaCall, SegmentsAreFollowed) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (const int kind : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(kind);
    Call call(prompt());
    const Segments segments(call.host.input());
    const Choice choice = {"mminference",
                           {{"kind", static_cast<double>(kind)},
                            {"vertical_size", 60},
                            {"slash_size", 102},
                            {"n_local", 200}}};
    AttentionParams params;
    params.stream = stream;
    params.measure = true;
    const Stats stats = attend(call, choice, params, segments.context());
    const std::vector<float> values = call.values();
    EXPECT_LT(stats.kept_pairs, stats.causal_pairs);

    const Method& method = find_method(choice.method);
    SparseIndex index = method.build_index(
        call.host.input(), {}, resolve_options(method, choice.options), segments.context());
    for (HeadIndex& head : index.heads) {
      if (head.kind == HeadIndex::Kind::kDiagonal) head.rounding = RunRounding::kBox;
    }
    Result expected = make_result(call.host.input(), DType::kF32, Layout::kPacked);
    const Stats on_cpu = attention(call.host.input(), {}, expected.output(), &index);
    const std::vector<float> wanted = comparable(expected.out.values());
    EXPECT_LT(relative_error(values, wanted), 2e-2);
    EXPECT_NEAR(static_cast<double>(stats.kept_pairs), static_cast<double>(on_cpu.kept_pairs),
                0.01 * static_cast<double>(on_cpu.kept_pairs));

    params.measure = false;
    const AttentionPlan plan =
        plan_attention(call.input(), params, method, choice.options, segments.context());
    execute(plan, call.input(), call.output());
    EXPECT_EQ(call.values(), values);

    Call fresh(prompt());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    attend(fresh, choice, params, segments.context());
    check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    EXPECT_EQ(fresh.values(), values);
    check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

TEST_F(CudaCall, BadSegmentsAreRefused) {
  const Call call(prompt());
  const std::int64_t kv_len = key_length(call.host.input(), 0);
  const std::vector<Segment> fine = {{0, 9, Modality::kVisual, 0}};
  const std::vector<std::vector<Segment>> bad = {
      {{5, 5, Modality::kVisual, 0}},
      {{kv_len - 5, kv_len + 1, Modality::kVisual, 0}},
      {{5, 9, Modality::kVisual, 0}, {8, 20, Modality::kVisual, 0}},
      {{5, 9, Modality::kVisual, 5}}};
  for (const std::vector<Segment>& of_first : bad) {
    const std::vector<std::span<const Segment>> spans = {of_first, fine};
    MethodContext context;
    context.segments = spans;
    EXPECT_THROW(attend(call, {"mminference", {}}, {}, context), InvalidArgument);
  }
  const std::vector<std::span<const Segment>> one = {fine};
  MethodContext context;
  context.segments = one;
  EXPECT_THROW(attend(call, {"mminference", {}}, {}, context), InvalidArgument);
}

}  // namespace
}  // namespace minference::test

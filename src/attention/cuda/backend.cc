// libminference_cuda.so: takes validated calls to the executors.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda/check.h"
#include "attention/cuda/device_kernels.h"
#include "attention/cuda/head_parts.h"
#include "attention/cuda/host_index.h"
#include "attention/cuda/library.h"
#include "attention/cuda/sm80_attention.h"
#include "attention/cuda/sm90_attention.h"
#include "attention/cuda/workspace.h"
#include "attention/kept_pairs.h"
#include "attention/validate.h"
#include "guard/cuda/recall.h"
#include "guard/recalls.h"
#include "index/cuda/build_index.h"
#include "minference/error.h"
#include "minference/version.h"

namespace minference::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The number of devices, at least 1. Throws Unsupported with the reason when there is none.
int device_count() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::string reason = code == cudaSuccess ? "the driver lists none" : cudaGetErrorString(code);
  if (driver == 0) {
    reason = "no NVIDIA driver is installed";
  } else if (code == cudaErrorInsufficientDriver) {
    reason =
        "the driver supports CUDA " + version_text(driver) + "; needed: " + version_text(runtime);
  }
  throw Unsupported("no CUDA device: " + reason);
}

// Makes a device current for as long as this lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    const int count = device_count();
    if (ordinal < 0 || ordinal >= count) {
      throw InvalidArgument("q is on cuda:" + std::to_string(ordinal) +
                            "; legal: cuda:0 to cuda:" + std::to_string(count - 1));
    }
    check(cudaGetDevice(&before_), "asking for the current device");
    check(cudaSetDevice(ordinal), "choosing the device");
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

DeviceTensor device_tensor(const TensorView& view) {
  DeviceTensor tensor;
  tensor.data = static_cast<char*>(view.data);
  tensor.batch_stride = view.strides[0];
  tensor.token_stride = view.strides[1];
  tensor.head_stride = view.strides[2];
  tensor.dtype = view.dtype;
  return tensor;
}

std::int32_t narrow(const char* name, std::int64_t value) {
  if (value >= kMaxPosition) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                          "; legal on a CUDA device: below " + std::to_string(kMaxPosition));
  }
  return static_cast<std::int32_t>(value);
}

const std::int32_t* upload_lengths(std::span<const std::int64_t> lengths, Workspace& workspace) {
  const std::vector<std::int32_t> narrowed(lengths.begin(), lengths.end());
  return workspace.upload(std::span<const std::int32_t>(narrowed));
}

Problem make_problem(const AttentionInput& input, const AttentionParams& params,
                     const AttentionOutput& output, Workspace& workspace) {
  Problem problem;
  problem.q = device_tensor(input.q);
  problem.k = device_tensor(input.k);
  problem.v = device_tensor(input.v);
  problem.out = device_tensor(output.out);
  problem.lse = device_tensor(output.lse);
  problem.batch = narrow("batch", input.q.batch());
  problem.q_tokens = narrow("q_tokens", input.q.tokens());
  problem.kv_tokens = narrow("kv_tokens", key_capacity(input));
  problem.q_heads = narrow("q_heads", input.q.heads());
  problem.kv_heads = narrow("kv_heads", input.k.heads());
  problem.group = problem.q_heads / problem.kv_heads;
  problem.dim = static_cast<std::int32_t>(input.q.dim());
  problem.v_dim = static_cast<std::int32_t>(input.v.dim());
  problem.window = static_cast<std::int32_t>(std::min(params.sliding_window, kMaxPosition));
  problem.causal = params.causal;
  problem.scale =
      params.scale != 0 ? params.scale : 1 / std::sqrt(static_cast<float>(input.q.dim()));
  problem.soft_cap = params.soft_cap;
  problem.q_lens = upload_lengths(input.q_lens, workspace);
  problem.kv_lens = upload_lengths(input.kv_lens, workspace);
  problem.sinks = workspace.upload(input.sinks);
  if (!input.block_table.empty()) {
    problem.block_table = workspace.upload(input.block_table);
    problem.page_size = narrow("page_size", input.k.tokens());
    problem.pages_per_sequence = narrow("pages_per_sequence", input.pages_per_sequence);
  }
  problem.mask = input.mask.words;
  problem.mask_row_stride = input.mask.row_stride;
  problem.mask_sequence_stride = input.mask.sequence_stride;
  return problem;
}

DeviceIndex upload_index(const SparseIndex& index, std::int64_t q_tokens, Workspace& workspace) {
  DeviceIndex device;
  // Without an index the executors know that every head is dense, which they do faster.
  if (std::all_of(index.heads.begin(), index.heads.end(),
                  [](const HeadIndex& head) { return head.kind == HeadIndex::Kind::kDense; })) {
    return device;
  }
  const HostIndex host(index, q_tokens);
  device.heads = workspace.upload(std::span<const DeviceHead>(host.heads));
  device.runs = workspace.upload(std::span<const DeviceRun>(host.runs));
  device.columns = workspace.upload(std::span<const std::int32_t>(host.columns));
  device.block_rows = workspace.upload(std::span<const std::int32_t>(host.block_rows));
  device.block_ids = workspace.upload(std::span<const std::int32_t>(host.block_ids));
  device.column_capacity = std::ssize(host.columns);
  return device;
}

// Two events around the work of a call.
class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    check(cudaEventCreate(&begin_), "creating an event");
    check(cudaEventCreate(&end_), "creating an event");
    check(cudaEventRecord(begin_, stream_), "recording an event");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Waits for the work so far.
  double seconds() {
    float milliseconds = 0;
    check(cudaEventRecord(end_, stream_), "recording an event");
    check(cudaEventSynchronize(end_), "waiting for attention");
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "timing attention");
    return milliseconds * 1e-3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

bool runs_on_hopper(const Problem& problem, int kernels) {
  return kernels == 90 && sm90_takes(problem);
}

void run(Problem& problem, const DeviceIndex& index, bool hopper, Workspace& workspace,
         cudaStream_t stream) {
  int* tickets = reinterpret_cast<int*>(workspace.allocate(kTickets * sizeof(int)));
  if (hopper) {
    GatheredColumns columns;
    if (index.column_capacity > 0) {
      columns.keys = workspace.allocate(GatheredColumns::bytes(problem, index));
      columns.values =
          columns.keys + index.column_capacity * problem.dim * dtype_size(problem.k.dtype);
      gather_columns(problem, index, columns, stream);
    }
    sm90_attention(problem, index, columns, tickets, stream);
  } else {
    sm80_attention(problem, index, tickets, stream);
  }
}

IndexWorkspace take(Workspace& workspace, std::int64_t bytes) {
  return {workspace.allocate(bytes), bytes};
}

// Device memory for the index that a recipe makes.
std::int64_t index_bytes(const Problem& problem, const IndexRecipe& recipe) {
  switch (recipe.kind) {
    case IndexRecipe::Kind::kPatterns:
      return pattern_index_bytes(problem, recipe.patterns);
    case IndexRecipe::Kind::kBlockSparse:
      return block_sparse_index_bytes(problem, recipe.top_k);
    case IndexRecipe::Kind::kAntidiagonal:
      return antidiagonal_index_bytes(problem, recipe.antidiagonal);
    case IndexRecipe::Kind::kFlexPrefill:
      return flexprefill_index_bytes(problem, recipe.flexprefill);
    case IndexRecipe::Kind::kModalities:
      return modality_index_bytes(problem, recipe.modality, recipe.sequences);
    case IndexRecipe::Kind::kCoverage:
      return coverage_index_bytes(problem, recipe.coverage);
  }
  throw Error("an index recipe of an unknown kind");
}

// What has to be computed exactly instead is counted in `stats`.
DeviceIndex build_index(const Problem& problem, const IndexRecipe& recipe, int kernels,
                        Workspace& workspace, cudaStream_t stream, Stats& stats) {
  BoxCosts costs;
  if (recipe.kind == IndexRecipe::Kind::kCoverage) {
    if (const char* reason = coverage_refusal(problem)) {
      stats.fallbacks[reason] += 1;
      return {};
    }
    costs = box_costs(problem, runs_on_hopper(problem, kernels));
    if (!coverage_may_pay(problem, recipe.coverage, costs)) return {};
  }
  const IndexWorkspace memory = take(workspace, index_bytes(problem, recipe));
  switch (recipe.kind) {
    case IndexRecipe::Kind::kPatterns:
      return build_pattern_index(problem, recipe.patterns, memory, stream);
    case IndexRecipe::Kind::kBlockSparse:
      return build_block_sparse_index(problem, recipe.top_k, memory, stream);
    case IndexRecipe::Kind::kAntidiagonal:
      return build_antidiagonal_index(problem, recipe.antidiagonal, memory, stream);
    case IndexRecipe::Kind::kFlexPrefill:
      return build_flexprefill_index(problem, recipe.flexprefill, memory, stream);
    case IndexRecipe::Kind::kModalities:
      return build_modality_index(problem, recipe.modality, recipe.sequences, memory, stream);
    case IndexRecipe::Kind::kCoverage:
      return build_coverage_index(problem, recipe.coverage, recipe.rows_after, costs, memory,
                                  stream);
  }
  throw Error("an index recipe of an unknown kind");
}

// All heads at once, but for recipes that treat every head alike and whose index may grow with the square
// of the length.
HeadParts parts_of(const Problem& problem, const IndexSource& source) {
  const bool by_blocks =
      source.recipe != nullptr && (source.recipe->kind == IndexRecipe::Kind::kBlockSparse ||
                                   source.recipe->kind == IndexRecipe::Kind::kAntidiagonal ||
                                   source.recipe->kind == IndexRecipe::Kind::kFlexPrefill ||
                                   source.recipe->kind == IndexRecipe::Kind::kModalities);
  return {problem, index_memory_limit(problem),
          [&](const Problem& part) { return by_blocks ? index_bytes(part, *source.recipe) : 0; }};
}

DeviceIndex index_of(const AttentionInput& input, const Problem& problem, const IndexSource& source,
                     int kernels, Workspace& workspace, cudaStream_t stream, Stats& stats) {
  if (source.recipe != nullptr) {
    return build_index(problem, *source.recipe, kernels, workspace, stream, stats);
  }
  if (source.index != nullptr) return upload_index(*source.index, input.q.tokens(), workspace);
  return {};
}

// Enqueues the recall of every head of an index that has heads; see measure_recall().
const float* enqueue_recall(const Problem& problem, const DeviceIndex& index,
                            const RowSample& sample, float least, DeviceHead* guarded,
                            Workspace& workspace, cudaStream_t stream) {
  const IndexWorkspace memory = take(workspace, recall_bytes(problem, sample));
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  auto* recall = reinterpret_cast<float*>(
      workspace.allocate(heads * static_cast<std::int64_t>(sizeof(float))));
  measure_recall(problem, index, sample, least, recall, guarded, memory, stream);
  return recall;
}

// Waits for the stream.
std::vector<double> read_recall(const Problem& problem, const float* recall, cudaStream_t stream) {
  std::vector<float> values(static_cast<std::size_t>(problem.batch) * problem.q_heads);
  check(cudaMemcpyAsync(values.data(), recall, values.size() * sizeof(float),
                        cudaMemcpyDeviceToHost, stream),
        "reading the guard's recalls");
  check(cudaStreamSynchronize(stream), "waiting for the guard");
  return {values.begin(), values.end()};
}

// The smallest float that is not below: floats compare with it as with the value.
float least_float(double value) {
  const auto rounded = static_cast<float>(value);
  return rounded < value ? std::nextafter(rounded, std::numeric_limits<float>::infinity())
                         : rounded;
}

// The index with those heads dense that the guard does not let pass.
DeviceIndex guarded_index(const Problem& problem, DeviceIndex index, const GuardOptions& options,
                          bool measure, Workspace& workspace, cudaStream_t stream, Stats& stats) {
  const bool enforce = options.mode == GuardMode::kEnforce;
  if (options.mode == GuardMode::kOff || (!enforce && !measure)) return index;
  const std::int64_t heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
  if (index.heads == nullptr) {
    if (measure) add_recalls(std::vector<double>(heads, 1.0), options, stats);
    return index;
  }
  DeviceHead* guarded = nullptr;
  if (enforce) {
    guarded = reinterpret_cast<DeviceHead*>(
        workspace.allocate(heads * static_cast<std::int64_t>(sizeof(DeviceHead))));
  }
  std::optional<Timer> timer;
  if (measure) timer.emplace(stream);
  const float* recall = enqueue_recall(problem, index, {options.rows, kGuardRowsPerSample},
                                       least_float(options.min_recall), guarded, workspace, stream);
  if (measure) {
    stats.guard_seconds += timer->seconds();
    add_recalls(read_recall(problem, recall, stream), options, stats);
  }
  if (enforce) index.heads = guarded;
  return index;
}

// The first half of a call.
DeviceIndex find_index(const AttentionInput& input, const AttentionParams& params,
                       const Problem& problem, const IndexSource& source, int kernels,
                       Workspace& workspace, Stats& stats) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  std::optional<Timer> timer;
  if (params.measure) timer.emplace(stream);
  const DeviceIndex index = index_of(input, problem, source, kernels, workspace, stream, stats);
  if (params.measure) stats.index_seconds += timer->seconds();
  return guarded_index(problem, index, source.guard, params.measure, workspace, stream, stats);
}

// The second half.
void attend(const AttentionParams& params, Problem& problem, const DeviceIndex& index, int kernels,
            Workspace& workspace, Stats& stats) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const bool hopper = runs_on_hopper(problem, kernels);
  stats.cuda_kernels = hopper ? 90 : 80;
  if (!params.measure) return run(problem, index, hopper, workspace, stream);
  unsigned long long pairs = 0;
  char* counter = workspace.allocate(sizeof(pairs));
  check(cudaMemsetAsync(counter, 0, sizeof(pairs), stream), "clearing a counter");
  problem.kept_pairs = reinterpret_cast<unsigned long long*>(counter);
  Timer timer(stream);
  run(problem, index, hopper, workspace, stream);
  stats.kernel_seconds += timer.seconds();
  check(cudaMemcpy(&pairs, counter, sizeof(pairs), cudaMemcpyDeviceToHost), "reading a counter");
  stats.kept_pairs += static_cast<std::int64_t>(pairs);
}

// What dense attention would have computed.
void count_causal_pairs(const AttentionInput& input, const AttentionParams& params, Stats& stats) {
  if (!params.measure) return;
  if (!input.mask.empty()) {
    // An explicit mask lies on the device, where nobody counts it.
    stats.causal_pairs = stats.kept_pairs;
    return;
  }
  for (const std::int64_t causal : kept_pairs(input, params, nullptr)) stats.causal_pairs += causal;
}

// Both halves, of a part of the heads at a time. What a part takes is given back before the next.
void find_and_attend(const AttentionInput& input, const AttentionParams& params,
                     const Problem& problem, const IndexSource& source, int kernels,
                     Workspace& workspace, Stats& stats) {
  const HeadParts parts = parts_of(problem, source);
  parts.for_each([&](const HeadPart& part) {
    std::optional<Workspace> own;
    if (part.count < problem.q_heads) own.emplace(static_cast<cudaStream_t>(params.stream));
    Workspace& memory = own ? *own : workspace;
    Problem of_part = problem_of(problem, part);
    const DeviceIndex index = find_index(input, params, of_part, source, kernels, memory, stats);
    attend(params, of_part, index, kernels, memory, stats);
  });
  count_causal_pairs(input, params, stats);
}

bool is_empty(const AttentionInput& input) { return input.q.batch() == 0 || input.q.tokens() == 0; }

// Runs `work` and turns what it throws into a Failure.
template <class Work>
void guarded(Failure& failure, Work&& work) {
  try {
    work();
  } catch (const InvalidArgument& e) {
    failure = {Failure::Kind::kInvalidArgument, e.what()};
  } catch (const Unsupported& e) {
    failure = {Failure::Kind::kUnsupported, e.what()};
  } catch (const std::exception& e) {
    failure = {Failure::Kind::kError, e.what()};
  }
}

const char* kind_of(const IndexSource& source) {
  return source.index == nullptr && source.recipe == nullptr ? "dense" : "sparse";
}

class Plan final : public DevicePlan {
 public:
  Plan(const AttentionInput& input, const AttentionParams& params, const IndexSource& source,
       Stats& stats)
      : ordinal_(input.q.device.ordinal), kind_(kind_of(source)) {
    const CurrentDevice current(ordinal_);
    const int kernels = current_kernels();
    if (is_empty(input)) return;
    // Given back, if something fails, before the device changes.
    auto workspace = std::make_unique<Workspace>(static_cast<cudaStream_t>(params.stream));
    const Problem problem = make_problem(input, params, {}, *workspace);
    index_ = find_index(input, params, problem, source, kernels, *workspace, stats);
    workspace_ = std::move(workspace);
  }
  ~Plan() override {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(ordinal_);
    workspace_.reset();
    cudaSetDevice(before);
  }

  void execute(const AttentionInput& input, const AttentionParams& params,
               const AttentionOutput& output, Stats& stats, Failure& failure) const override {
    guarded(failure, [&] {
      stats.method = kind_;
      const CurrentDevice current(ordinal_);
      const int kernels = current_kernels();
      if (is_empty(input)) return;
      Workspace workspace(static_cast<cudaStream_t>(params.stream));
      Problem problem = make_problem(input, params, output, workspace);
      attend(params, problem, index_, kernels, workspace, stats);
      count_causal_pairs(input, params, stats);
    });
  }

 private:
  int ordinal_;
  const char* kind_;
  std::unique_ptr<Workspace> workspace_;
  DeviceIndex index_;
};

void list_devices(std::vector<CudaDevice>& devices) {
  const int count = device_count();
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, ordinal), "asking for a device's properties");
    CudaDevice device;
    device.ordinal = ordinal;
    device.name = properties.name;
    device.major = properties.major;
    device.minor = properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.memory = static_cast<std::int64_t>(properties.totalGlobalMem);
    const int kernels = device_kernels(ordinal, device.major);
    device.kernels = kernels == 90 ? "sm_90a" : (kernels == 80 ? "sm_80" : "");
    devices.push_back(device);
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const Library* minference_cuda_library() {
  static const Library library = {
      version(),
      [](std::vector<CudaDevice>& devices, Failure& failure) {
        guarded(failure, [&] { list_devices(devices); });
      },
      [](const AttentionInput& input, const AttentionParams& params, const AttentionOutput& output,
         const IndexSource& source, Stats& stats, Failure& failure) {
        guarded(failure, [&] {
          stats.method = kind_of(source);
          const CurrentDevice current(input.q.device.ordinal);
          const int kernels = current_kernels();
          if (is_empty(input)) return;
          Workspace workspace(static_cast<cudaStream_t>(params.stream));
          const Problem problem = make_problem(input, params, output, workspace);
          find_and_attend(input, params, problem, source, kernels, workspace, stats);
        });
      },
      [](const AttentionInput& input, const AttentionParams& params, const IndexSource& source,
         Stats& stats, Failure& failure) {
        std::unique_ptr<DevicePlan> plan;
        guarded(failure, [&] { plan = std::make_unique<Plan>(input, params, source, stats); });
        return plan;
      },
      [](const AttentionInput& input, const AttentionParams& params, const SparseIndex& index,
         const RowSample& sample, Failure& failure) {
        std::vector<double> recall(index.heads.size(), 1.0);
        guarded(failure, [&] {
          const CurrentDevice current(input.q.device.ordinal);
          current_kernels();  // throws for a device that is too old
          if (is_empty(input)) return;
          const auto stream = static_cast<cudaStream_t>(params.stream);
          Workspace workspace(stream);
          const Problem problem = make_problem(input, params, {}, workspace);
          const DeviceIndex device = upload_index(index, input.q.tokens(), workspace);
          if (device.heads == nullptr) return;
          recall = read_recall(
              problem, enqueue_recall(problem, device, sample, 0.0F, nullptr, workspace, stream),
              stream);
        });
        return recall;
      }};
  return &library;
}

}  // namespace minference::cuda

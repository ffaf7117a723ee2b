#include "index/cuda/class_sums.h"

#include "index/cuda/last_q_sums.cuh"
#include "index/cuda/row_pass.cuh"

namespace minference::cuda {
namespace {

using namespace last_q;    // NOLINT(google-build-using-namespace): this file is their front
using namespace row_pass;  // NOLINT(google-build-using-namespace)

struct ClassArguments : row_pass::Arguments {
  ClassSums sums;
  const std::uint32_t* visual = nullptr;
  std::int64_t stride = 0;
  int of_class = 0;

  // Of one class.
  __host__ __device__ std::int64_t tails() const {
    return static_cast<std::int64_t>(plan.chunks) * kRanges * kPassRows;
  }
};

// Those of 32 keys from 32 * word on that are of the class.
__device__ std::uint32_t keys_of_class(const ClassArguments& a, int word) {
  return a.of_class != 0 ? a.visual[word] : ~a.visual[word];
}

// The second kernel, for each class: what a warp does with the scores of one head and its range of keys.
class SumsOfClass {
 public:
  using Rows = LastRows;
  static constexpr bool kNeedsKeys = true;

  // Executed by a whole block: whether there is nothing of the class among its keys.
  __device__ static bool is_idle(const ClassArguments& a, const Task& task) {
    const int words = a.plan.range * kRanges / 32;
    std::uint32_t some = 0;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
      some |= keys_of_class(a, task.first_key / 32 + i);
    }
    return __syncthreads_or(some != 0 ? 1 : 0) == 0;
  }

  __device__ SumsOfClass(const ClassArguments& a, const Task& task, Control<Rows>& control,
                         std::int64_t head, int local)
      : a_(a), task_(task), sums_(control.log_sums[local]), head_(static_cast<int>(head)) {
    combine_partials<Rows>(a, task, a.partials + head * a.plan.chunks * kPassRows,
                           control.log_sums[local]);
  }

  __device__ void add(const float (&scores)[kScores], float factor, int first_key, int) {
    const std::uint32_t keys = keys_of_class(a_, first_key / 32) >> (first_key % 32);
    float column;
    float diagonal;
    sums_.add(
        scores, factor, [&](int octet) { return (keys >> (octet * 8 + lane() / 4) & 1) != 0; },
        column, diagonal);
    const int key = first_key + SlashSums::place();
    if (!SlashSums::writes() || key >= task_.geometry.kv_len) return;
    if ((keys >> SlashSums::place() & 1) != 0) a_.sums.columns[head_ * a_.stride + key] = column;
    a_.sums.diagonals[row() * a_.stride + key] = diagonal;
  }

  __device__ void end() {
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    float* tails = a_.sums.tails + row() * a_.tails() +
                   (static_cast<int>(blockIdx.x) * kRanges + warp) * kPassRows + SlashSums::place();
    for (int n = 0; n < kPassRows; n += kStepKeys) {
      const float diagonal = sums_.advance();
      if (SlashSums::writes()) tails[n] = diagonal;
    }
  }

 private:
  __device__ std::int64_t row() const {
    return static_cast<std::int64_t>(head_) * kKeyClasses + a_.of_class;
  }

  // Registers are short: the rest is read where it is needed.
  const ClassArguments& a_;
  const Task& task_;
  SlashSums sums_;
  int head_;
};

constexpr int kJoinThreads = 256;

// Adds to each range's first diagonals what the range before has of them. A thread a diagonal, for each
// head and class.
__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const __grid_constant__ ClassArguments a) {
  const int i = static_cast<int>(blockIdx.x) * kJoinThreads + static_cast<int>(threadIdx.x);
  if (i >= a.tails()) return;
  const std::int64_t at =
      static_cast<std::int64_t>(i / kPassRows + 1) * a.plan.range + i % kPassRows;
  if (at < a.problem.kv_tokens) {
    a.sums.diagonals[blockIdx.y * a.stride + at] += a.sums.tails[blockIdx.y * a.tails() + i];
  }
}

}  // namespace

ClassSums allocate_class_sums(const Problem& problem, const LastQPlan& plan,
                              const ClassSums* shared, MemoryPieces& workspace) {
  const std::int64_t heads = static_cast<std::int64_t>(plan.units) * problem.group;
  ClassSums sums;
  sums.columns = workspace.take<float>(heads * plan.stride);
  sums.diagonals = workspace.take<float>(heads * kKeyClasses * plan.stride);
  if (shared != nullptr) {
    sums.partials = shared->partials;
    sums.tails = shared->tails;
  } else {
    sums.partials = workspace.take<float2>(heads * plan.chunks * kPassRows);
    sums.tails =
        workspace.take<float>(heads * kKeyClasses * plan.chunks * LastQPlan::kRanges * kPassRows);
  }
  return sums;
}

void estimate_by_class(const Problem& problem, const LastQPlan& plan, const std::uint32_t* visual,
                       const std::uint8_t* wanted, int first, int count, const ClassSums& sums,
                       cudaStream_t stream) {
  ClassArguments arguments{arguments_of(problem, plan, wanted)};
  arguments.partials = sums.partials;
  arguments.first_unit = first;
  arguments.sums = sums;
  arguments.visual = visual;
  arguments.stride = plan.stride;
  const std::int64_t heads = static_cast<std::int64_t>(count) * problem.group;
  const auto clear = [&](float* values, std::int64_t of_head) {
    check(cudaMemsetAsync(values, 0, heads * of_head * sizeof(float), stream), "clearing sums");
  };
  clear(sums.columns, plan.stride);
  clear(sums.diagonals, kKeyClasses * plan.stride);
  clear(sums.tails, kKeyClasses * arguments.tails());
  row_pass::launch<StatsOfHead<LastRows>>(arguments, count, stream);
  for (arguments.of_class = 0; arguments.of_class < kKeyClasses; ++arguments.of_class) {
    row_pass::launch<SumsOfClass>(arguments, count, stream);
  }
  const auto blocks = static_cast<unsigned>((arguments.tails() + kJoinThreads - 1) / kJoinThreads);
  join_kernel<<<dim3(blocks, static_cast<unsigned>(heads) * kKeyClasses), kJoinThreads, 0,
                stream>>>(arguments);
  check(cudaGetLastError(), "joining sums");
}

}  // namespace minference::cuda

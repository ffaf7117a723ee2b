// auto on the device: estimate, choice, and the index that follows from it.
#include <algorithm>

#include "attention/cuda/check.h"
#include "attention/cuda/head_parts.h"
#include "index/coverage_rule.h"
#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "index/cuda/coverings.h"
#include "index/cuda/density.cuh"
#include "index/cuda/top_k.cuh"

namespace minference::cuda {
namespace {

// An estimate may take this share of what exact attention takes.
constexpr double kEstimateShare = 1.0 / 6;

struct Arguments {
  Problem problem;
  CoveragePlan plan;
  CoveringRule rule;
  CoverageTables masses;
  CoveringTables coverings;
  std::uint8_t* wanted = nullptr;  // [batch][q_heads]: has to be estimated
  DeviceHead* heads = nullptr;
  std::int32_t* columns = nullptr;
  DeviceRun* runs = nullptr;
  std::int64_t run_room = 0;  // of a head
};

// Whether an estimate may pay for rows that see so many keys on average.
MINFERENCE_HOST_DEVICE bool is_worth_estimating(const CoveringRule& rule, double rows,
                                                double kv_len, double mean_keys) {
  const BoxCosts& costs = rule.costs;
  return mean_keys >= static_cast<double>(rule.rule.min_keys) && mean_keys >= costs.least_keys &&
         costs.estimate_rows * kv_len <= kEstimateShare * rows * mean_keys;
}

__device__ double mean_keys(const Geometry& geometry) {
  const double first = geometry.position(0) + 1;
  const double last = geometry.kv_len;
  if (geometry.window == 0 || last <= geometry.window) return (first + last) / 2;
  const double window = geometry.window;
  if (first >= window) return window;
  const double growing = window - first;
  return (growing * (first + window) / 2 + (geometry.q_len - growing) * window) / geometry.q_len;
}

__global__ void mark_wanted(const __grid_constant__ Arguments a) {
  const int b = static_cast<int>(blockIdx.x);
  const Geometry geometry = sequence_geometry(a.problem, b);
  const bool wanted =
      geometry.q_len > 0 && geometry.q_len <= geometry.kv_len &&
      is_worth_estimating(a.rule, geometry.q_len, geometry.kv_len, mean_keys(geometry));
  for (int h = static_cast<int>(threadIdx.x); h < a.problem.q_heads;
       h += static_cast<int>(blockDim.x)) {
    a.wanted[b * a.problem.q_heads + h] = wanted ? 1 : 0;
  }
}

// Executed by a block: the keys of a class and above, ascending; returns their number.
__device__ int write_columns(const Geometry& geometry, const std::uint8_t* classes, int least_class,
                             BlockScan& scan, std::int32_t* columns) {
  constexpr int kOfWord = 16;  // keys whose classes a thread looks at
  const int shift = box_shift(geometry);
  const auto* words = reinterpret_cast<const std::uint64_t*>(classes);
  const int count = (geometry.kv_len + shift + kOfWord - 1) / kOfWord;
  int before = 0;
  for (int base = 0; base < count; base += kSelectThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const std::uint64_t word = i < count ? words[i] : 0;
    std::uint32_t kept = 0;
#pragma unroll
    for (int k = 0; k < kOfWord; ++k) {
      const int of_key = static_cast<int>(word >> (k % 8 * 8 + k / 8 * 4) & 15);
      kept |= static_cast<std::uint32_t>(of_key >= least_class ? 1 : 0) << k;
    }
    int total;
    int at = before + scan.exclusive(__popc(kept), total);
    for (; kept != 0; kept &= kept - 1) {
      columns[at++] = i * kOfWord + __ffs(static_cast<int>(kept)) - 1 - shift;
    }
    before += total;
  }
  return before;
}

// Executed by a block: the runs of the distances from a step of density on; returns their number.
__device__ int write_runs(const Densities& densities, int least_step, BlockScan& scan,
                          DeviceRun* runs) {
  int before = 0;
  for (int base = 0; base < densities.count(); base += kSelectThreads) {
    const int distance = base + static_cast<int>(threadIdx.x);
    const bool kept = densities.step(distance) >= least_step;
    const bool begins = kept && densities.step(distance - 1) < least_step;
    int total;
    const int run = before + scan.exclusive(begins ? 1 : 0, total);
    if (begins) {
      runs[run].begin = distance * kBoxKeys;
      runs[run].stride = 1;
      runs[run].unused = 0;
    }
    if (kept && densities.step(distance + 1) < least_step) {
      runs[run - (begins ? 0 : 1)].end = distance * kBoxKeys + 1;
    }
    before += total;
  }
  return before;
}

// A block a head, from the first one of a sequence on. rows_after: see exact_last_rows().
__global__ void __launch_bounds__(kSelectThreads)
    write_heads(const __grid_constant__ Arguments a, int first_sequence, std::int64_t rows_after) {
  __shared__ BlockScan::Shared scan_memory;
  const std::int64_t head = std::int64_t{first_sequence} * a.problem.q_heads + blockIdx.x;
  const std::int32_t chosen = a.coverings.chosen[head];
  if (chosen == kDenseOffer) {
    if (threadIdx.x == 0) a.heads[head] = {};
    return;
  }
  const Geometry geometry =
      sequence_geometry(a.problem, static_cast<int>(head / a.problem.q_heads));
  const int least_class = chosen / kDensitySteps + 1;
  DeviceHead result;
  result.kind = HeadIndex::Kind::kDiagonal;
  result.rounding = RunRounding::kBox;
  const std::int64_t last_rows = exact_last_rows(a.rule.rule, geometry.q_len, rows_after);
  result.dense_last_rows =
      static_cast<std::int32_t>(last_rows < geometry.q_len ? last_rows : geometry.q_len);
  result.column_begin = head * a.rule.column_room;
  result.run_begin = head * a.run_room;
  BlockScan scan(scan_memory);
  result.column_count = write_columns(geometry, a.masses.classes + head * a.plan.class_bytes,
                                      least_class, scan, a.columns + result.column_begin);
  const Densities densities(geometry,
                            a.masses.by_distance + head * kHalves * kMassClasses * a.plan.distances,
                            a.plan.distances, least_class);
  result.run_count = write_runs(densities, chosen % kDensitySteps, scan, a.runs + result.run_begin);
  if (threadIdx.x == 0) a.heads[head] = result;
}

// Columns that a head has room for: so many that they, gathered, and the rest of the workspace stay within
// the limit.
std::int32_t room_for_columns(const Problem& problem, std::int64_t other_bytes) {
  constexpr std::int64_t kOfExecutors = std::int64_t{1} << 20;
  constexpr std::int64_t kMost = 1 << 14;
  const std::int64_t row_bytes = std::int64_t{2} * (problem.dim + problem.v_dim);
  const std::int64_t heads = std::int64_t{problem.batch} * problem.q_heads;
  const std::int64_t left = index_memory_limit(problem) - kOfExecutors - other_bytes;
  const std::int64_t room =
      left / (heads * (row_bytes + static_cast<std::int64_t>(sizeof(std::int32_t))));
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(room / kBoxKeys * kBoxKeys, kBoxKeys, kMost));
}

// A call, laid out in the workspace.
Arguments lay_out(const Problem& problem, const CoverageRule& rule, const BoxCosts& costs,
                  MemoryPieces& workspace) {
  check_problem(problem);
  Arguments a;
  a.problem = problem;
  // A whole tile of rows takes no longer than a part of it.
  a.plan = plan_coverage(problem, kPassRows);
  a.masses = allocate(problem, a.plan, workspace);
  a.coverings = allocate_coverings(problem, workspace);
  const std::int64_t heads = std::int64_t{problem.batch} * problem.q_heads;
  a.run_room = a.plan.distances / 2 + 1;
  a.wanted = workspace.take<std::uint8_t>(heads);
  a.heads = workspace.take<DeviceHead>(heads);
  a.runs = workspace.take<DeviceRun>(heads * a.run_room);
  a.rule = {rule, costs, room_for_columns(problem, workspace.used())};
  a.columns = workspace.take<std::int32_t>(heads * a.rule.column_room);
  return a;
}

}  // namespace

const char* coverage_refusal(const Problem& problem) {
  if (problem.q.dtype != problem.k.dtype) return "auto on CUDA: q and k are of two types";
  if (problem.dim % 8 != 0) return "auto on CUDA: head_dim is no multiple of 8";
  return nullptr;
}

bool coverage_may_pay(const Problem& problem, const CoverageRule& rule, const BoxCosts& costs) {
  // Lengths of single sequences are the device's.
  const double kv_len = problem.kv_tokens;
  const bool ragged = problem.q_lens != nullptr || problem.kv_lens != nullptr;
  const double mean_keys = ragged ? kv_len : kv_len - (problem.q_tokens - 1) / 2.0;
  return problem.kv_tokens > 0 && is_worth_estimating({rule, costs, 0}, problem.q_tokens,
                                                      ragged ? mean_keys : kv_len, mean_keys);
}

std::int64_t coverage_index_bytes(const Problem& problem, const CoverageRule& rule) {
  MemoryPieces counted;
  lay_out(problem, rule, {}, counted);
  return counted.used();
}

DeviceIndex build_coverage_index(const Problem& problem, const CoverageRule& rule,
                                 std::span<const std::int64_t> rows_after, const BoxCosts& costs,
                                 const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Arguments a = lay_out(problem, rule, costs, given);
  check_workspace(workspace, given.used());
  constexpr int kMarkThreads = 128;
  mark_wanted<<<problem.batch, kMarkThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "choosing the heads to estimate");
  estimate_coverage(problem, a.plan, a.wanted, a.masses, stream);
  choose_coverings(problem, a.plan, a.wanted, a.masses, a.rule, a.coverings, stream);
  // One launch for neighbours with as many rows to come, which all of a batch mostly have.
  const auto after = [&](int b) { return rows_after.empty() ? -1 : rows_after[b]; };
  for (int b = 0, end = 0; b < problem.batch; b = end) {
    while (end < problem.batch && after(end) == after(b)) ++end;
    write_heads<<<static_cast<unsigned>((end - b) * problem.q_heads), kSelectThreads, 0, stream>>>(
        a, b, after(b));
    check(cudaGetLastError(), "writing an index");
  }
  DeviceIndex index;
  index.heads = a.heads;
  index.columns = a.columns;
  index.runs = a.runs;
  index.column_capacity = std::int64_t{problem.batch} * problem.q_heads * a.rule.column_room;
  index.dense_apart = true;
  return index;
}

}  // namespace minference::cuda

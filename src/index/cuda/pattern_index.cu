// The heads of a pattern file on the device: estimate, selection, merged runs and the choice of dense
// attention, as build_from_patterns() on the CPU.
#include <algorithm>
#include <string>
#include <vector>

#include "attention/cuda/check.h"
#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "index/cuda/diagonal_head.cuh"
#include "index/cuda/head_plan.h"
#include "index/cuda/last_q.h"
#include "index/cuda/pooled.h"
#include "index/cuda/top_k.cuh"
#include "methods/head_rules.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

using Kind = HeadPattern::Kind;

struct Arguments {
  Problem problem;
  IndexArrays arrays;
  LastQPlan estimate;
  LastQSums sums;
  std::uint8_t* wanted = nullptr;  // [batch][q_heads]: has to be estimated
  SelectParts parts;
  SelectRow rows;  // of all heads that are estimated at a time, columns and offsets of each
};

__global__ void mark_wanted(const __grid_constant__ Arguments a) {
  const int b = static_cast<int>(blockIdx.x);
  const Geometry geometry = sequence_geometry(a.problem, b);
  for (int h = static_cast<int>(threadIdx.x); h < a.problem.q_heads;
       h += static_cast<int>(blockDim.x)) {
    const HeadPlan& plan = a.arrays.plans[h];
    // Budgets that keep every key need no estimate.
    const bool all = max(plan.vertical, static_cast<int>(kForcedColumns)) >= geometry.kv_len ||
                     max(plan.slash, static_cast<int>(kForcedOffsets)) >= geometry.kv_len;
    a.wanted[b * a.problem.q_heads + h] =
        plan.kind == Kind::kVerticalSlash && !all && geometry.q_len > 0 ? 1 : 0;
  }
}

// The masses that one row of the selection chooses from, in its order.
struct Masses {
  float* first = nullptr;
  int step = 1;

  __device__ float operator()(int i) const { return first[i * step]; }
};

// A head of those that are estimated at a time.
struct Head {
  int row = 0;  // in the sums
  int b = 0;
  int h = 0;
  Geometry geometry;

  __device__ Head(const Arguments& a, int first_unit, int i) : row(i) {
    const int unit = first_unit + row / a.problem.group;
    b = unit / a.problem.kv_heads;
    h = unit % a.problem.kv_heads * a.problem.group + row % a.problem.group;
    geometry = sequence_geometry(a.problem, b);
  }

  __device__ bool wanted(const Arguments& a) const {
    return a.wanted[b * a.problem.q_heads + h] != 0;
  }
};

// One row of the selection: a head's columns or its offsets.
struct Selection {
  int forced = 0;  // the first ones, which count against the budget
  int budget = 0;
  int n = 0;  // others
  Masses masses;
  std::int32_t* kept = nullptr;
  SelectRow row;

  __device__ Selection(const Arguments& a, const Head& head, bool of_columns) {
    const HeadPlan& plan = a.arrays.plans[head.h];
    const int kv_len = head.geometry.kv_len;
    forced = static_cast<int>(of_columns ? kForcedColumns : kForcedOffsets);
    budget = max(of_columns ? plan.vertical : plan.slash, forced);
    n = kv_len - forced;
    const std::int64_t begin = head.row * a.estimate.stride;
    if (of_columns) {
      masses = {a.sums.columns + begin + forced, 1};
      kept = a.arrays.columns + head.b * a.arrays.columns_of_sequence + plan.column_begin;
    } else {
      masses = {a.sums.diagonals + begin + (kv_len - 1 - forced), -1};
      kept = a.arrays.lists + head.b * a.arrays.lists_of_sequence + plan.list_begin;
    }
    const std::int64_t i = head.row * 2 + (of_columns ? 0 : 1);
    row.memory = a.rows.memory + i;
    row.ranks = a.rows.ranks + i * a.parts.parts * a.parts.candidates;
  }
};

// Executed by a block: adds to each range's first diagonals, as far as they are of the part, what the
// range before has of them.
__device__ void join_ranges(const Arguments& a, const Head& head, const Selection& selection,
                            int part) {
  const int range = a.estimate.range;
  const float* tails = a.sums.tails + static_cast<std::int64_t>(head.row) * a.estimate.chunks *
                                          LastQPlan::kRanges * kLastRows;
  // Diagonal of the part's item i: last - i.
  const int last = head.geometry.kv_len - 1 - selection.forced;
  const int low = last - a.parts.end(part, selection.n) + 1;
  const int high = last - a.parts.begin(part, selection.n);
  const int first_range = max(low / range, 1);
  for (int i = static_cast<int>(threadIdx.x);; i += kSelectThreads) {
    const int of_range = first_range + i / kLastRows;
    if (of_range * range > high) break;
    const int at = of_range * range + i % kLastRows;
    if (at < low || at > high) continue;
    selection.masses.first[at - last] +=
        tails[static_cast<std::int64_t>(of_range - 1) * kLastRows + i % kLastRows];
  }
  __syncthreads();
}

enum class Phase { kDigit, kThreshold, kKeep };

// Blocks (part, columns or offsets, head).
template <Phase kPhase>
__global__ void __launch_bounds__(kSelectThreads, 2)
    select_kernel(const __grid_constant__ Arguments a, int first_unit) {
  __shared__ SelectShared shared;
  const int part = static_cast<int>(blockIdx.x);
  const bool of_columns = blockIdx.y == 0;
  const Head head(a, first_unit, static_cast<int>(blockIdx.z));
  if (!head.wanted(a)) return;
  const Selection s(a, head, of_columns);
  const int k = s.budget - s.forced;
  if constexpr (kPhase == Phase::kDigit) {
    if (!of_columns) join_ranges(a, head, s, part);
    for (int i = static_cast<int>(threadIdx.x); part == 0 && i < s.forced; i += kSelectThreads) {
      s.kept[i] = i;
    }
    if (k > 0) find_first_digit(s.masses, s.n, k, a.parts, part, s.row, shared);
  } else if constexpr (kPhase == Phase::kThreshold) {
    if (k > 0) find_threshold(s.masses, s.n, a.parts, part, s.row, shared);
  } else {
    if (k == 0) return;
    for_each_selected(s.masses, s.n, a.parts, part, s.row, shared,
                      [&](int number, int i) { s.kept[s.forced + number] = s.forced + i; });
  }
}

// Keys 0 ... vertical - 1 and the `slash` nearest ones, exactly, as a_shape_head().
__device__ void write_a_shape(const HeadPlan& plan, int kv_len, DeviceHead head,
                              std::int32_t* columns, DeviceRun* runs, DeviceHead& result) {
  if (static_cast<std::int64_t>(plan.vertical) + plan.slash < kv_len) {
    for (int i = static_cast<int>(threadIdx.x); i < plan.vertical; i += kSelectThreads) {
      columns[i] = i;
    }
    if (threadIdx.x == 0) runs[0] = {0, plan.slash, 1, 0};
    head.kind = HeadIndex::Kind::kDiagonal;
    head.rounding = RunRounding::kNone;
    head.column_count = plan.vertical;
    head.run_count = plan.slash > 0 ? 1 : 0;
  }
  if (threadIdx.x == 0) result = head;
}

// A block a head: merges the kept offsets and writes the head.
__global__ void __launch_bounds__(kSelectThreads)
    finish_kernel(const __grid_constant__ Arguments a, int first_unit) {
  __shared__ BlockScan::Shared scan_memory;
  __shared__ long long totals[2];
  const Head head(a, first_unit, static_cast<int>(blockIdx.x));
  const HeadPlan& plan = a.arrays.plans[head.h];
  if (plan.kind == Kind::kBlockSparse) return;  // written by others
  DeviceHead result;
  result.column_begin = head.b * a.arrays.columns_of_sequence + plan.column_begin;
  result.run_begin = head.b * a.arrays.runs_of_sequence + plan.run_begin;
  std::int32_t* columns = a.arrays.columns + result.column_begin;
  DeviceRun* runs = a.arrays.runs + result.run_begin;
  DeviceHead& to = a.arrays.heads[head.b * a.problem.q_heads + head.h];
  if (plan.kind == Kind::kAShape && head.geometry.q_len > 0) {
    write_a_shape(plan, head.geometry.kv_len, result, columns, runs, to);
    return;
  }
  if (!head.wanted(a)) {
    if (threadIdx.x == 0) to = {};
    return;
  }
  const Selection offsets(a, head, false);
  BlockScan scan(scan_memory);
  result.run_count = merge_offsets(offsets.kept, offsets.budget, scan, runs);
  result.column_count = Selection(a, head, true).budget;
  result.kind = HeadIndex::Kind::kDiagonal;
  const bool dense = dense_is_cheaper(head.geometry, runs, result.run_count, result.column_count,
                                      scan, offsets.kept, totals);
  if (threadIdx.x == 0) to = dense ? DeviceHead{} : result;
}

std::int32_t to_count(std::int64_t budget) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(budget, 0, kMost));
}

// The plans of the heads, and what the arrays need for them.
std::vector<HeadPlan> plan_heads(const Problem& problem, std::span<const HeadPattern> heads,
                                 IndexArrays& arrays) {
  const std::int64_t kv_tokens = problem.kv_tokens;
  const auto round = [](std::int64_t n) { return (n + kBoxKeys - 1) / kBoxKeys * kBoxKeys; };
  std::vector<HeadPlan> plans;
  for (const HeadPattern& pattern : heads) {
    HeadPlan plan;
    plan.kind = pattern.kind;
    plan.vertical = to_count(pattern.vertical);
    plan.slash = to_count(pattern.slash);
    plan.column_begin = arrays.columns_of_sequence;
    plan.run_begin = arrays.runs_of_sequence;
    plan.list_begin = arrays.lists_of_sequence;
    switch (plan.kind) {
      case Kind::kVerticalSlash: {
        const std::int64_t columns = std::max<std::int64_t>(plan.vertical, kForcedColumns);
        const std::int64_t offsets = std::max<std::int64_t>(plan.slash, kForcedOffsets);
        arrays.columns_of_sequence += round(std::min(columns, kv_tokens));
        // Runs begin more than a row block apart.
        arrays.runs_of_sequence += std::min(offsets, kv_tokens / (kRowBlock + 1) + 1);
        arrays.lists_of_sequence += std::min(offsets, kv_tokens) + 1;
        break;
      }
      case Kind::kAShape:
        arrays.columns_of_sequence += round(std::min<std::int64_t>(plan.vertical, kv_tokens));
        arrays.runs_of_sequence += 1;
        break;
      case Kind::kBlockSparse:
        add_block_head(problem, std::max(kBlockSparseTopK, kForcedBlocks), plan, arrays);
        break;
    }
    plans.push_back(plan);
  }
  return plans;
}

bool has_kind(const std::vector<HeadPlan>& plans, Kind kind) {
  return std::any_of(plans.begin(), plans.end(),
                     [=](const HeadPlan& plan) { return plan.kind == kind; });
}

// A call, laid out in the workspace.
struct Layout {
  std::vector<HeadPlan> plans;
  Arguments arguments;
  PooledPlan pooled;

  Layout(const Problem& problem, std::span<const HeadPattern> heads, MemoryPieces& workspace) {
    check_problem(problem);
    if (static_cast<std::int64_t>(heads.size()) != problem.q_heads) {
      throw InvalidArgument(
          "there are " + std::to_string(heads.size()) +
          " head patterns; legal: one a query head = " + std::to_string(problem.q_heads));
    }
    Arguments& a = arguments;
    a.problem = problem;
    plans = plan_heads(problem, heads, a.arrays);
    allocate(problem, workspace, a.arrays);
    if (has_kind(plans, Kind::kBlockSparse)) {
      pooled = plan_pooled(problem, workspace);
    }
    a.wanted =
        workspace.take<std::uint8_t>(static_cast<std::int64_t>(problem.batch) * problem.q_heads);
    a.estimate = plan_last_q(problem);
    a.sums = allocate(problem, a.estimate, workspace);
    plan_selection(workspace);
  }

  std::int64_t selection_rows() const {
    return static_cast<std::int64_t>(arguments.estimate.units) * arguments.problem.group * 2;
  }

 private:
  void plan_selection(MemoryPieces& workspace) {
    Arguments& a = arguments;
    const std::int64_t rows = selection_rows();
    a.parts = plan_parts(a.problem.kv_tokens, rows);
    a.rows.memory = workspace.take<SelectMemory>(rows);
    a.rows.ranks = workspace.take<std::uint32_t>(rows * a.parts.parts * a.parts.candidates);
  }
};

}  // namespace

std::int64_t pattern_index_bytes(const Problem& problem, std::span<const HeadPattern> heads) {
  MemoryPieces counted;
  const Layout layout(problem, heads, counted);
  return counted.used();
}

DeviceIndex build_pattern_index(const Problem& problem, std::span<const HeadPattern> heads,
                                const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Layout layout(problem, heads, given);
  check_workspace(workspace, given.used());
  const Arguments& a = layout.arguments;
  upload_plans(layout.plans, a.arrays.plans, stream);
  if (has_kind(layout.plans, Kind::kBlockSparse)) {
    build_pooled_heads(problem, a.arrays, layout.pooled, static_cast<int>(kBlockSparseTopK),
                       stream);
  }
  constexpr int kMarkThreads = 128;
  mark_wanted<<<problem.batch, kMarkThreads, 0, stream>>>(a);
  check(cudaGetLastError(), "choosing the heads to estimate");
  const bool estimates = has_kind(layout.plans, Kind::kVerticalSlash);
  const int units = problem.batch * problem.kv_heads;
  for (int first = 0; first < units; first += a.estimate.units) {
    const int count = std::min(a.estimate.units, units - first);
    const int heads = count * problem.group;
    if (estimates) {
      check(
          cudaMemsetAsync(a.rows.memory, 0, layout.selection_rows() * sizeof(SelectMemory), stream),
          "clearing counts");
      estimate_last_q(problem, a.estimate, a.wanted, first, count, a.sums, stream);
      const dim3 grid(a.parts.parts, 2, heads);
      select_kernel<Phase::kDigit><<<grid, kSelectThreads, 0, stream>>>(a, first);
      select_kernel<Phase::kThreshold><<<grid, kSelectThreads, 0, stream>>>(a, first);
      select_kernel<Phase::kKeep><<<grid, kSelectThreads, 0, stream>>>(a, first);
    }
    finish_kernel<<<heads, kSelectThreads, 0, stream>>>(a, first);
    check(cudaGetLastError(), "selecting columns and offsets");
  }
  return a.arrays.index(problem.batch);
}

}  // namespace minference::cuda

#include "index/cuda/coverage.h"

#include "index/cuda/coverage_rows.cuh"
#include "index/cuda/row_pass.cuh"

namespace minference::cuda {
namespace {

using namespace row_pass;  // NOLINT(google-build-using-namespace): this file is their front

constexpr int kSinks = static_cast<int>(MassTable::kSinks);
// The first keys have the last class, whatever their mass: as on the CPU, every covering has them.
constexpr int kFirstKeys = static_cast<int>(kRunGranule);

// The first kernel: the softmax's partial sums, and what the first keys' masses follow from.
class StatsAndSinks {
 public:
  using Rows = SpreadRows;
  static constexpr bool kNeedsKeys = false;

  __device__ StatsAndSinks(const CoverageArguments& a, const Task& task, Control<Rows>& control,
                           std::int64_t head, int local)
      : stats_(a, task, control, head, local), sinks_(a.tables.sinks + head * kPassRows * kSinks) {}

  __device__ void add(const float (&scores)[kScores], float factor, int first_key, int octet) {
    stats_.add(scores, factor, first_key, octet);
    if (first_key < kSinks && first_key + kStepKeys > 0) {
      keep_sinks(scores, factor, first_key, octet);
    }
  }

  __device__ void end() { stats_.end(); }

 private:
  __device__ void keep_sinks(const float (&scores)[kScores], float factor, int first_key,
                             int octet) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const int key = first_key + n / 2 % 2 * 8 + lane() / 4;
      const int slot = n / 4 * 8 + lane() % 4 * 2 + n % 2;
      if (key < 0 || key >= kSinks) continue;
      sinks_[slot * kSinks + key] = n / 4 < octet ? -kInfinity : scores[n] * factor;
    }
  }

  StatsOfHead<Rows> stats_;
  float* sinks_;
};

// The second kernel: classes of keys, and masses by class and distance.
class MassesOfHead {
 public:
  using Rows = SpreadRows;
  static constexpr bool kNeedsKeys = true;

  __device__ MassesOfHead(const CoverageArguments& a, const Task& task, Control<Rows>& control,
                          std::int64_t head, int local)
      : a_(a),
        control_(control),
        head_(static_cast<int>(head)),
        local_(local),
        first_position_(task.geometry.position(0)),
        shift_(box_shift(task.geometry)) {
    combine_partials<Rows>(a, task, a.partials + head * a.plan.chunks * kPassRows,
                           control.log_sums[local]);
    named_barrier(1 + local, 128);
    mean_ = mean_mass(a, task.geometry.kv_len, control, head, local);
  }

  __device__ void add(const float (&scores)[kScores], float factor, int first_key, int octet) {
    float p[kScores];
    float columns[kHalves][2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; ++n) p[n] = 0.0F;
      if (j < octet) continue;
      const float2 log_sums =
          *reinterpret_cast<const float2*>(control_.log_sums[local_] + 8 * j + lane() % 4 * 2);
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; ++n) {
        p[n] = exp2_fast(fmaf(scores[n], factor, n % 2 == 0 ? -log_sums.x : -log_sums.y));
        columns[n % 2][n / 2 % 2] += p[n];
      }
    }
    const int key = first_key + lane() / 4;
    if (first_key < kSinks) drop_sinks(key, p, columns);
    const int counted = first_key + shift_;
    int of_both[2];
    int classes[kHalves][2];  // of the keys, for the rows of a half
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        columns[half][i] += __shfl_xor_sync(~0U, columns[half][i], 1);
        columns[half][i] += __shfl_xor_sync(~0U, columns[half][i], 2);
        classes[1 - half][i] = class_of(key + 8 * i, kHalves * columns[half][i]);
      }
      of_both[i] = class_of(key + 8 * i, columns[0][i] + columns[1][i]);
    }
    if (lane() % 4 == 0) {
      a_.tables.classes[head_ * a_.class_bytes + counted / 2 + lane() / 4] =
          static_cast<std::uint8_t>(of_both[0] | of_both[1] << 4);
      count_column(key, of_both[0]);
      count_column(key + 8, of_both[1]);
    }
    const int heavy = classes[0][0] | classes[0][1] | classes[1][0] | classes[1][1];
    if (__any_sync(~0U, heavy != 0)) take_heavy(classes, counted / kBoxKeys, p);
#pragma unroll
    for (int n = 0; n < kScores; n += 4) {
      light_[n / 2] += p[n] + p[n + 2];
      light_[n / 2 + 1] += p[n + 1] + p[n + 3];
    }
    box_ = counted / kBoxKeys;
    if ((counted + kStepKeys) % kBoxKeys == 0) flush_light();
  }

  __device__ void end() {
    flush_light();
    const int thread = static_cast<int>(threadIdx.x) % 128;
    named_barrier(1 + static_cast<int>(threadIdx.x) / 128, 128);
    const std::uint32_t keys =
        thread < kMassClasses ? control_.rows.keys_of_class[local_][thread] : 0;
    if (keys > 0) {
      const int at = head_ * kMassClasses + thread;
      atomicAdd(a_.tables.keys_of_class + at, keys);
      atomicAdd(a_.tables.rows_of_class + at, control_.rows.rows_of_class[local_][thread]);
    }
  }

 private:
  // Of a key, of what the sinks leave. Executed by a warpgroup.
  __device__ static float mean_mass(const CoverageArguments& a, int kv_len, Control<Rows>& control,
                                    std::int64_t head, int local) {
    const int slot = static_cast<int>(threadIdx.x) % 128;
    float left = 0;
    if (slot < kPassRows && control.rows.positions[slot] >= 0) {
      const float* sinks = a.tables.sinks + (head * kPassRows + slot) * kSinks;
      left = 1;
      for (int c = 0; c < kSinks; ++c) left -= exp2_fast(sinks[c] - control.log_sums[local][slot]);
    }
    for (int distance = 1; distance < 32; distance *= 2) {
      left += __shfl_xor_sync(~0U, left, distance);
    }
    if (slot < kPassRows && lane() == 0) control.rows.left[local][slot / 32] = left;
    named_barrier(1 + local, 128);
    left = control.rows.left[local][0] + control.rows.left[local][1];
    return fmaxf(left, 0.0F) / static_cast<float>(kv_len);
  }

  __device__ int class_of(int key, float mass) const {
    if (key >= 0 && key < kFirstKeys) return kMassClasses - 1;
    // Where the sinks took all mass, nothing is left to compare with.
    if (!(mass > 0 && mass >= 2 * mean_)) return 0;
    const int octaves = (__float_as_int(mass / mean_) >> 23) - 127;
    return min(octaves, kMassClasses - 1);
  }

  __device__ static void drop_sinks(int key, float (&p)[kScores], float (&columns)[kHalves][2]) {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if (key + n / 2 % 2 * 8 < kSinks) p[n] = columns[n % 2][n / 2 % 2] = 0.0F;
    }
  }

  __device__ void count_column(int key, int of_key) const {
    if (of_key == 0) return;
    atomicAdd(&control_.rows.keys_of_class[local_][of_key], 1U);
    // Rows of the chunk that stand at the key or behind it.
    const int rows = control_.rows.q_len - max(key - first_position_, 0);
    atomicAdd(&control_.rows.rows_of_class[local_][of_key], static_cast<unsigned long long>(rows));
  }

  // Takes what lies at heavy keys, and leaves zeros there.
  __device__ void take_heavy(const int (&classes)[kHalves][2], int box, float (&p)[kScores]) {
    std::uint32_t present = 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      present |= 1U << classes[half][0] | 1U << classes[half][1];
    }
    present = __reduce_or_sync(~0U, present) & ~1U;
#pragma unroll 1
    for (; present != 0; present &= present - 1) {
      const int c = __ffs(static_cast<int>(present)) - 1;
      float sums[16];
#pragma unroll
      for (int n = 0; n < kScores; n += 4) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          sums[n / 2 + half] = (classes[half][0] == c ? p[n + half] : 0.0F) +
                               (classes[half][1] == c ? p[n + 2 + half] : 0.0F);
        }
      }
      flush(sums, c, box);
    }
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      if (classes[n % 2][n / 2 % 2] != 0) p[n] = 0.0F;
    }
  }

  __device__ void flush_light() {
    flush(light_, 0, box_);
#pragma unroll
    for (float& sum : light_) sum = 0.0F;
  }

  // Adds the warp's sums, over the keys of a box, of the lane's 16 slots.
  __device__ void flush(const float (&sums)[16], int c, int box) const {
    float left[2];
    spread(sums, left);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const auto units = static_cast<std::uint32_t>(__float2int_rn(left[half] / kMassUnit));
      if (units == 0) continue;
      const int distance = control_.rows.boxes[lane() / 4 * 8 + lane() % 4 * 2 + half] - box;
      const std::int64_t table = (std::int64_t{head_} * kHalves + half) * kMassClasses + c;
      atomicAdd(a_.tables.by_distance + table * a_.distances + distance, units);
    }
  }

  // Sums over the eight lanes that hold the same slots, shared out among them: the lane is left with
  // slots 8 * (lane / 4) + 2 * (lane % 4) and the next.
  __device__ static void spread(const float (&sums)[16], float (&left)[2]) {
    float eight[8];
    halve<8, 16>(sums, eight);
    float four[4];
    halve<4, 8>(eight, four);
    halve<2, 4>(four, left);
  }

  template <int kLeft, int kDistance>
  __device__ static void halve(const float (&from)[2 * kLeft], float (&to)[kLeft]) {
    const bool upper = (lane() & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const float given = upper ? from[i] : from[kLeft + i];
      to[i] = (upper ? from[kLeft + i] : from[i]) + __shfl_xor_sync(~0U, given, kDistance);
    }
  }

  const CoverageArguments& a_;
  Control<Rows>& control_;
  int head_;
  int local_;
  int first_position_;
  int shift_;
  int box_ = 0;
  float mean_;
  float light_[16] = {};  // of the box's light keys so far
};

std::int64_t heads_of(const Problem& problem) {
  return static_cast<std::int64_t>(problem.batch) * problem.q_heads;
}

}  // namespace

CoveragePlan plan_coverage(const Problem& problem, int rows) {
  const std::int64_t keys = static_cast<std::int64_t>(problem.kv_tokens) + kBoxKeys - 1;
  const std::int64_t units = static_cast<std::int64_t>(problem.batch) * problem.kv_heads;
  CoveragePlan plan{plan_row_pass(problem, keys, units)};
  plan.rows = rows;
  plan.distances = keys / kBoxKeys + 1;
  plan.class_bytes = static_cast<std::int64_t>(plan.chunks) * RowPassPlan::kRanges * plan.range / 2;
  return plan;
}

CoverageTables allocate(const Problem& problem, const CoveragePlan& plan, MemoryPieces& workspace) {
  const std::int64_t heads = heads_of(problem);
  CoverageTables tables;
  tables.partials = workspace.take<float2>(heads * plan.chunks * kPassRows);
  tables.sinks = workspace.take<float>(heads * kPassRows * kSinks);
  tables.by_distance =
      workspace.take<std::uint32_t>(heads * kHalves * kMassClasses * plan.distances);
  tables.keys_of_class = workspace.take<std::uint32_t>(heads * kMassClasses);
  tables.rows_of_class = workspace.take<unsigned long long>(heads * kMassClasses);
  tables.classes = workspace.take<std::uint8_t>(heads * plan.class_bytes);
  return tables;
}

void estimate_coverage(const Problem& problem, const CoveragePlan& plan, const std::uint8_t* wanted,
                       const CoverageTables& tables, cudaStream_t stream) {
  const std::int64_t heads = heads_of(problem);
  const auto clear = [&]<class T>(T* values, std::int64_t count) {
    check(cudaMemsetAsync(values, 0, count * sizeof(T), stream), "clearing an estimate");
  };
  clear(tables.by_distance, heads * kHalves * kMassClasses * plan.distances);
  clear(tables.keys_of_class, heads * kMassClasses);
  clear(tables.rows_of_class, heads * kMassClasses);
  CoverageArguments arguments{arguments_of(problem, plan, wanted)};
  arguments.rows = plan.rows;
  arguments.distances = plan.distances;
  arguments.class_bytes = plan.class_bytes;
  const int units = problem.batch * problem.kv_heads;
  for (int first = 0; first < units; first += plan.units) {
    const int count = std::min(plan.units, units - first);
    // Row i of the tables is head i of these units.
    const std::int64_t head = static_cast<std::int64_t>(first) * problem.group;
    arguments.first_unit = first;
    arguments.tables = tables;
    arguments.tables.sinks += head * kPassRows * kSinks;
    arguments.tables.by_distance += head * kHalves * kMassClasses * plan.distances;
    arguments.tables.keys_of_class += head * kMassClasses;
    arguments.tables.rows_of_class += head * kMassClasses;
    arguments.tables.classes += head * plan.class_bytes;
    arguments.partials = tables.partials + head * plan.chunks * kPassRows;
    launch<StatsAndSinks>(arguments, count, stream);
    launch<MassesOfHead>(arguments, count, stream);
  }
}

}  // namespace minference::cuda

// The guard on the device. A thread block takes a chunk of keys and up to 64 slots, which are the
// sampled rows of the query heads of one KV head. Its threads note in one bit a key what each row sees
// and what the index keeps of it; meanwhile the first keys are fetched. Then each warpgroup multiplies
// every other tile of keys with all slots, and sums the exponentials twice: of what is seen and of
// what is kept. A second kernel adds up the chunks.
#include "guard/cuda/recall.h"

#include <algorithm>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/check.h"
#include "attention/cuda/elements.cuh"
#include "attention/cuda/row_bits.cuh"
#include "attention/cuda/softmax.cuh"
#include "index/cuda/check_problem.h"
#include "index/cuda/memory_pieces.h"
#include "index/cuda/row_softmax.cuh"
#include "index/cuda/score_tile.cuh"

namespace minference::cuda {
namespace {

constexpr int kSlots = kTileTokens;
constexpr int kMaxTiles = 16;  // of keys, in a chunk
constexpr int kMaxWarpgroups = 2;
constexpr int kWarpsOfGroup = 4;
constexpr int kMaxWarps = kMaxWarpgroups * kWarpsOfGroup;
constexpr int kMaxThreads = kMaxWarps * 32;

// How the work is shared out.
struct Plan {
  RowSample sample;
  int rows = 1;        // slots of a head
  int slot_tiles = 1;  // thread blocks for the slots of a KV head
  int tiles = 1;       // of keys in a chunk
  int chunks = 1;
  int panels = 1;  // of 64 dims
  int warpgroups = kMaxWarpgroups;
  int stages = 2;  // tiles of keys of a warpgroup, in flight or in use
  int shared_bytes = 0;
};

// Softmax maximum and sum of a slot over the keys of a chunk: all that it sees, and all that is kept.
struct Partials {
  float2* seen = nullptr;  // [units][slot_tiles][chunks][kSlots]
  float2* kept = nullptr;
};

struct Arguments {
  Problem problem;
  DeviceIndex index;
  Plan plan;
  Partials partials;
  bool vectors = false;  // rows can be copied in chunks of 16 bytes, without conversion
};

// What every thread of a block knows about its work: not in registers, which are short.
struct Task {
  Geometry geometry;
  int b = 0;
  int kv_head = 0;
  int first_slot = 0;  // among those of the KV head
  int first_key = 0;
  int end_key = 0;
};

struct Shared {
  Task task;
  RowTile slots[kSlots];  // row_end 0: the slot is not used
  std::uint64_t seen[kMaxTiles][kSlots];
  std::uint64_t kept[kMaxTiles][kSlots];
  float maxima[2][kMaxWarps][kSlots];
  union {
    std::uint64_t columns[kSlots][kMaxTiles];  // of the heads of the slots, while these are marked
    float2 partials[2][kMaxWarps][kSlots];     // of the warps, later
  };
};

__device__ int sampled_rows(const Plan& plan, const Geometry& geometry) {
  return static_cast<int>(plan.sample.count(geometry.q_len));
}

__device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }

// As lower_bound(), by all lanes of a warp together.
__device__ int lower_bound_of_warp(const std::int32_t* positions, int count, std::int32_t key) {
  int low = 0;
  int high = count;
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int at = low + lane() * step;
    const int below = __popc(__ballot_sync(~0U, at < high && positions[at] < key));
    if (below == 0) break;
    high = min(high, low + below * step);
    low += (below - 1) * step + 1;
  }
  return low;
}

template <class T, int kPanels>
class Block {
 public:
  __device__ Block(const Arguments& a, Shared& shared, char* tiles)
      : a_(a),
        problem_(a.problem),
        shared_(shared),
        task_(shared.task),
        queries_(shared_address(tiles)),
        keys_(queries_ + kTileBytes),
        factor_((problem_.soft_cap > 0 ? 1.0F : problem_.scale) * kLog2E) {}

  __device__ void run() {
    if (threadIdx.x == 0) shared_.task = task_of_block();
    __syncthreads();
    const bool used = threadIdx.x < kSlots && choose_slot(static_cast<int>(threadIdx.x));
    const int all = __syncthreads_or(used ? 1 : 0);
    if (all == 0) return write_nothing();
    load_queries();
    load_keys(0);
    const int heads = head_of(kSlots - 1) + 1;
    for (int head = warp(); head < heads; head += warps()) mark_columns(head);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kSlots * a_.plan.tiles;
         i += static_cast<int>(blockDim.x)) {
      mark(i % kSlots, i / kSlots);
    }
    multiply();
    write_partials();
  }

 private:
  static constexpr int kTileBytes = kPanels * kPanelBytes;

  __device__ int warps() const { return a_.plan.warpgroups * kWarpsOfGroup; }
  __device__ int warpgroup() const { return warp() / kWarpsOfGroup; }
  __device__ int thread() const { return static_cast<int>(threadIdx.x) % 128; }

  __device__ Task task_of_block() const {
    const int place = static_cast<int>(blockIdx.x) / a_.plan.chunks;
    const int chunk = static_cast<int>(blockIdx.x) % a_.plan.chunks;
    const int unit = place / a_.plan.slot_tiles;
    Task task;
    task.b = unit / problem_.kv_heads;
    task.kv_head = unit % problem_.kv_heads;
    task.geometry = sequence_geometry(problem_, task.b);
    task.first_slot = place % a_.plan.slot_tiles * kSlots;
    task.first_key = chunk * a_.plan.tiles * kTileTokens;
    task.end_key = min(task.first_key + a_.plan.tiles * kTileTokens, task.geometry.kv_len);
    return task;
  }

  // False where the slot has nothing to do in this chunk.
  __device__ bool choose_slot(int s) {
    RowTile tile;
    const int of_head = task_.first_slot + s;
    const int head = of_head / a_.plan.rows;
    const int rows = sampled_rows(a_.plan, task_.geometry);
    if (head < problem_.group && of_head % a_.plan.rows < rows) {
      const int row =
          static_cast<int>(RowSample::row(of_head % a_.plan.rows, rows, task_.geometry.q_len));
      tile = {task_.b, task_.kv_head * problem_.group + head, row / kGroupRows * kGroupRows, row,
              row + 1};
      const int begin = max(task_.geometry.first_key(row), task_.first_key);
      const int end = min(task_.geometry.end_key(row), task_.end_key);
      const DeviceHead& index = a_.index.heads[task_.b * problem_.q_heads + tile.h];
      if (index.kind == HeadIndex::Kind::kDense || begin >= end) tile.row_end = 0;
    }
    shared_.slots[s] = tile;
    return tile.row_end != 0;
  }

  // Of the block's heads, that of a slot.
  __device__ int head_of(int s) const {
    return (task_.first_slot + s) / a_.plan.rows - task_.first_slot / a_.plan.rows;
  }

  // Executed by a warp: the columns of the chunk that a head keeps, the same for all of its rows.
  __device__ void mark_columns(int of_block) {
    std::uint64_t* words = shared_.columns[of_block];
    if (lane() < kMaxTiles) words[lane()] = 0;
    __syncwarp();
    const int in_group = task_.first_slot / a_.plan.rows + of_block;
    if (in_group >= problem_.group) return;
    const int h = task_.kv_head * problem_.group + in_group;
    const DeviceHead& head = a_.index.heads[task_.b * problem_.q_heads + h];
    if (head.kind != HeadIndex::Kind::kDiagonal) return;
    const std::int32_t* columns = a_.index.columns + head.column_begin;
    const int first = lower_bound_of_warp(columns, head.column_count, task_.first_key);
    for (int c = first + lane(); c < head.column_count && columns[c] < task_.end_key; c += 32) {
      const int key = columns[c] - task_.first_key;
      atomicOr(reinterpret_cast<unsigned long long*>(words + key / 64), 1ULL << (key % 64));
    }
  }

  // The words of one slot and tile of keys.
  __device__ void mark(int s, int tile) {
    const RowTile& of_slot = shared_.slots[s];
    std::uint64_t seen = 0;
    std::uint64_t kept = 0;
    if (of_slot.row_end != 0) {
      Box all;
      all.start = task_.first_key + tile * kBoxKeys;
      all.word[0] = ~0ULL;
      seen =
          visible_bits(problem_, DeviceIndex(), task_.geometry, of_slot, all, 0, of_slot.row_begin);
      if (seen != 0) {
        const DeviceHead& head = a_.index.heads[task_.b * problem_.q_heads + of_slot.h];
        kept = seen & (shared_.columns[head_of(s)][tile] |
                       kept_bits(a_.index, head, task_.geometry, of_slot.row_begin, all.start));
      }
    }
    shared_.seen[tile][s] = seen;
    shared_.kept[tile][s] = kept;
  }

  // Chunk tid % 8 of the rows of a tile that `from(r)` gives; null where there is none.
  template <class From>
  __device__ void load_rows(std::uint32_t tile, DType dtype, int first, int step,
                            const From& from) {
    const int chunk = static_cast<int>(threadIdx.x) % kChunkDims;
    for (int r = first; r < kTileTokens; r += step) {
      const char* row = from(r);
      if (a_.vectors) {
        load_row_chunks<kPanels>(tile, r, chunk, row, row != nullptr, problem_.dim, Chunks::kWhole);
      } else {
        convert_row_chunks(tile, r, chunk, row, dtype);
      }
    }
  }

  __device__ void convert_row_chunks(std::uint32_t tile, int row, int chunk, const char* from,
                                     DType dtype) {
#pragma unroll 1
    for (int p = 0; p < kPanels; ++p) {
      const int first = p * kPanelDims + chunk * kChunkDims;
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = first + 2 * i;
        const bool exists = from != nullptr;
        const float even = exists && d < problem_.dim ? load_element(from, dtype, d) : 0.0F;
        const float odd = exists && d + 1 < problem_.dim ? load_element(from, dtype, d + 1) : 0.0F;
        words[i] = pack_pair<T>(even, odd);
      }
      store_chunk(tile + p * kPanelBytes + chunk_offset(row, chunk), words);
    }
  }

  __device__ void load_queries() {
    load_rows(queries_, problem_.q.dtype, static_cast<int>(threadIdx.x) / kChunkDims,
              static_cast<int>(blockDim.x) / kChunkDims, [&](int s) -> const char* {
                const RowTile& tile = shared_.slots[s];
                if (tile.row_end == 0) return nullptr;
                return tensor_row(problem_.q, tile.b, tile.row_begin, tile.h);
              });
  }

  // The n-th of this warpgroup's tiles.
  __device__ int tile_of(int n) const { return n * a_.plan.warpgroups + warpgroup(); }
  __device__ int first_key_of(int n) const { return task_.first_key + tile_of(n) * kTileTokens; }
  __device__ bool exists(int n) const {
    return tile_of(n) < a_.plan.tiles && first_key_of(n) < task_.end_key;
  }
  __device__ std::uint32_t keys_of(int n) const {
    return keys_ + (warpgroup() * a_.plan.stages + n % a_.plan.stages) * kTileBytes;
  }

  // Executed by a warpgroup.
  __device__ void load_keys(int n) {
    if (exists(n)) {
      RowTile tile;
      tile.b = task_.b;
      tile.h = task_.kv_head * problem_.group;
      const BoxRows rows(problem_, a_.index, tile, first_key_of(n), false, problem_.k);
      load_rows(keys_of(n), problem_.k.dtype, thread() / kChunkDims, 128 / kChunkDims,
                [&](int r) { return rows.row(r); });
    }
    cp_async_commit();
  }

  // Executed by a warpgroup, after mark().
  __device__ void multiply() {
    row_pass::SoftmaxSums seen(shared_.maxima[0][warp()]);
    row_pass::SoftmaxSums kept(shared_.maxima[1][warp()]);
    cp_async_wait<0>();
    fence_for_products();
    __syncthreads();
    const bool ahead = a_.plan.stages > 1;
#pragma unroll 1
    for (int n = 0; exists(n); ++n) {
      if (ahead) {
        load_keys(n + 1);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      fence_for_products();
      named_barrier(1 + warpgroup(), 128);
      float scores[kScores];
      start_products<T, kPanels>(keys_of(n), queries_, scores);
      finish_products(scores);
      named_barrier(1 + warpgroup(), 128);
      if (!ahead) load_keys(n + 1);
      if (problem_.soft_cap > 0) {
        const float exponent = soft_cap_exponent(problem_.soft_cap, problem_.scale);
#pragma unroll
        for (float& score : scores) score = soft_capped(score, problem_.soft_cap, exponent);
      }
      hide_others(shared_.seen[tile_of(n)], scores);
      seen.add(scores, factor_, 0);
      hide_others(shared_.kept[tile_of(n)], scores);
      kept.add(scores, factor_, 0);
    }
    seen.store(shared_.partials[0][warp()]);
    kept.store(shared_.partials[1][warp()]);
  }

  // Hides the keys whose bits are not set from the slots; of the warp's 16 keys.
  __device__ void hide_others(const std::uint64_t (&words)[kSlots],
                              float (&scores)[kScores]) const {
    const float hidden = factor_ < 0 ? kInfinity : -kInfinity;
    const auto* parts = reinterpret_cast<const std::uint16_t*>(words) + warp() % kWarpsOfGroup;
#pragma unroll
    for (int q = 0; q < kScores / 2; ++q) {
      const int slot = q / 2 * 8 + lane() % 4 * 2 + q % 2;
      const int bits = parts[slot * 4] >> (lane() / 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[q / 2 * 4 + i * 2 + q % 2];
        if ((bits >> (8 * i) & 1) == 0) score = hidden;
      }
    }
  }

  __device__ float2* partials_of(float2* all) const {
    return all + static_cast<std::int64_t>(blockIdx.x) * kSlots;
  }

  __device__ void write_partials() {
    __syncthreads();
    const int which = static_cast<int>(threadIdx.x) / kSlots;
    const int slot = static_cast<int>(threadIdx.x) % kSlots;
    if (which >= 2) return;
    float2 total{row_pass::kNoMaximum, 0.0F};
    for (int w = 0; w < warps(); ++w) {
      total = row_pass::merged(total, shared_.partials[which][w][slot]);
    }
    partials_of(which == 0 ? a_.partials.seen : a_.partials.kept)[slot] = total;
  }

  __device__ void write_nothing() const {
    if (threadIdx.x >= kSlots) return;
    partials_of(a_.partials.seen)[threadIdx.x] = {row_pass::kNoMaximum, 0.0F};
    partials_of(a_.partials.kept)[threadIdx.x] = {row_pass::kNoMaximum, 0.0F};
  }

  const Arguments& a_;
  const Problem& problem_;
  Shared& shared_;
  const Task& task_;
  std::uint32_t queries_;
  std::uint32_t keys_;
  float factor_;  // makes scores exponents of 2
};

template <class T, int kPanels>
__global__ void __launch_bounds__(kMaxThreads, kPanels == 4 ? 1 : 2)
    recall_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ char memory[];
  __shared__ Shared shared;
  // The swizzle counts from multiples of 1,024 bytes.
  Block<T, kPanels> block(a, shared, memory + (1024 - shared_address(memory) % 1024) % 1024);
  block.run();
}

constexpr int kFinishThreads = 512;

// A block a head: the mean over its sampled rows, and what becomes of the head.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ Arguments a, float least, float* recall,
                  DeviceHead* guarded) {
  __shared__ float kept_of_row[kSlots];  // negative: the row sees nothing
  const int b = static_cast<int>(blockIdx.x) / a.problem.q_heads;
  const int h = static_cast<int>(blockIdx.x) % a.problem.q_heads;
  const int rows = sampled_rows(a.plan, sequence_geometry(a.problem, b));
  DeviceHead head = a.index.heads[blockIdx.x];
  const bool sparse = head.kind != HeadIndex::Kind::kDense;
  for (int i = warp(); sparse && i < rows; i += kFinishThreads / 32) {
    const int of_unit = h % a.problem.group * a.plan.rows + i;
    const std::int64_t unit = b * a.problem.kv_heads + h / a.problem.group;
    const std::int64_t at =
        (unit * a.plan.slot_tiles + of_unit / kSlots) * a.plan.chunks * kSlots + of_unit % kSlots;
    const auto total = [&](const float2* partials) {
      float2 sum{row_pass::kNoMaximum, 0.0F};
      for (int chunk = lane(); chunk < a.plan.chunks; chunk += 32) {
        sum = row_pass::merged(sum, partials[at + static_cast<std::int64_t>(chunk) * kSlots]);
      }
      for (int distance = 1; distance < 32; distance *= 2) {
        sum = row_pass::merged(
            sum, {__shfl_xor_sync(~0U, sum.x, distance), __shfl_xor_sync(~0U, sum.y, distance)});
      }
      return sum;
    };
    const float2 seen = total(a.partials.seen);
    const float2 kept = total(a.partials.kept);
    if (lane() != 0) continue;
    const float share = kept.y / seen.y * exp2f(kept.x - seen.x);
    // Both are rounded sums.
    kept_of_row[i] = seen.y == 0 ? -1.0F : (share > 1 ? 1.0F : share);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  int counted = 0;
  for (int i = 0; sparse && i < rows; ++i) {
    if (kept_of_row[i] < 0) continue;
    sum += kept_of_row[i];
    ++counted;
  }
  const float mean = counted > 0 ? sum / static_cast<float>(counted) : 1.0F;
  recall[blockIdx.x] = mean;
  if (guarded == nullptr) return;
  if (mean < least) head = {};
  guarded[blockIdx.x] = head;
}

int dynamic_bytes(const Plan& plan) {
  return 1024 + (1 + plan.warpgroups * plan.stages) * plan.panels * kPanelBytes;
}

Plan plan_recall(const Problem& problem, const RowSample& sample) {
  Plan plan;
  plan.sample = sample;
  plan.rows = static_cast<int>(std::max<std::int64_t>(sample.count(problem.q_tokens), 1));
  plan.slot_tiles = (problem.group * plan.rows + kSlots - 1) / kSlots;
  while (plan.panels * kPanelDims < problem.dim) plan.panels *= 2;
  const int limit =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(sizeof(Shared));
  if (dynamic_bytes(plan) > limit) plan.warpgroups = 1;
  if (dynamic_bytes(plan) > limit) plan.stages = 1;
  plan.shared_bytes = dynamic_bytes(plan);
  // Chunks as large as the multiprocessors stay busy with: a block begins with the walks of its slots.
  constexpr int kLeastTiles = 4;
  constexpr int kResident = 2;
  const std::int64_t tiles = (std::max(problem.kv_tokens, 1) + kTileTokens - 1) / kTileTokens;
  const std::int64_t blocks =
      static_cast<std::int64_t>(problem.batch) * problem.kv_heads * plan.slot_tiles;
  plan.tiles = static_cast<int>(std::clamp<std::int64_t>(
      tiles * blocks / (static_cast<std::int64_t>(kResident) * multiprocessors()), kLeastTiles,
      kMaxTiles));
  plan.chunks = static_cast<int>((tiles + plan.tiles - 1) / plan.tiles);
  return plan;
}

Partials allocate(const Problem& problem, const Plan& plan, MemoryPieces& workspace) {
  const std::int64_t count = static_cast<std::int64_t>(problem.batch) * problem.kv_heads *
                             plan.slot_tiles * plan.chunks * kSlots;
  Partials partials;
  partials.seen = workspace.take<float2>(count);
  partials.kept = workspace.take<float2>(count);
  return partials;
}

template <class T, int kPanels>
void launch(const Arguments& arguments, cudaStream_t stream) {
  const Plan& plan = arguments.plan;
  const auto kernel = recall_kernel<T, kPanels>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), plan.shared_bytes);
  const int grid =
      arguments.problem.batch * arguments.problem.kv_heads * plan.slot_tiles * plan.chunks;
  kernel<<<grid, plan.warpgroups * 128, plan.shared_bytes, stream>>>(arguments);
  check(cudaGetLastError(), "starting the guard");
}

template <class T>
void launch(const Arguments& arguments, cudaStream_t stream) {
  switch (arguments.plan.panels) {
    case 1:
      return launch<T, 1>(arguments, stream);
    case 2:
      return launch<T, 2>(arguments, stream);
    default:
      return launch<T, 4>(arguments, stream);
  }
}

}  // namespace

std::int64_t recall_bytes(const Problem& problem, const RowSample& sample) {
  MemoryPieces counted;
  allocate(problem, plan_recall(problem, sample), counted);
  return counted.used();
}

void measure_recall(const Problem& problem, const DeviceIndex& index, const RowSample& sample,
                    float least, float* recall, DeviceHead* guarded,
                    const IndexWorkspace& workspace, cudaStream_t stream) {
  Arguments arguments;
  arguments.problem = problem;
  arguments.index = index;
  arguments.plan = plan_recall(problem, sample);
  MemoryPieces given(workspace.data);
  arguments.partials = allocate(problem, arguments.plan, given);
  check_workspace(workspace, given.used());
  const bool f16 = problem.q.dtype == DType::kF16 && problem.k.dtype == DType::kF16;
  const DType type = f16 ? DType::kF16 : DType::kBF16;
  arguments.vectors = problem.q.dtype == type && problem.k.dtype == type &&
                      problem.dim % kChunkDims == 0 && is_aligned(problem.q) &&
                      is_aligned(problem.k);
  if (f16) {
    launch<__half>(arguments, stream);
  } else {
    launch<__nv_bfloat16>(arguments, stream);
  }
  finish_kernel<<<problem.batch * problem.q_heads, kFinishThreads, 0, stream>>>(arguments, least,
                                                                                recall, guarded);
  check(cudaGetLastError(), "finishing the guard");
}

}  // namespace minference::cuda

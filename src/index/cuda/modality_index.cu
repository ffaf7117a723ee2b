// mminference in prompts with visual segments, on the device: build_index() of methods/mminference.cc.
//
// Sequences are worked on one after the other, and of each as many heads at a time as have room. A sample of
// rows is estimated as a sequence of its own that ends with its last row: no key behind it is seen.
#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "attention/cuda/box_stream.cuh"
#include "attention/cuda/check.h"
#include "attention/cuda/host_index.h"
#include "attention/cuda/send.h"
#include "index/cuda/build_index.h"
#include "index/cuda/check_problem.h"
#include "index/cuda/diagonal_head.cuh"
#include "index/cuda/modality_work.h"
#include "minference/error.h"

namespace minference::cuda {
namespace {

using Kind = ModalityRule::Kind;

constexpr int kMarkThreads = 256;

// A range of visual keys, in device memory.
struct KeyRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// A thread 32 keys: of `count` ascending ranges, which of them are in one.
__global__ void __launch_bounds__(kMarkThreads)
    mark_kernel(const KeyRange* ranges, int count, int words, std::uint32_t* bits) {
  const int word = static_cast<int>(blockIdx.x) * kMarkThreads + static_cast<int>(threadIdx.x);
  if (word >= words) return;
  const int first = word * 32;
  int range = 0;
  for (int rest = count; rest > 0;) {  // the first one that ends behind the first key
    const int half = rest / 2;
    if (ranges[range + half].end <= first) {
      range += half + 1;
      rest -= half + 1;
    } else {
      rest = half;
    }
  }
  std::uint32_t marked = 0;
  for (; range < count && ranges[range].begin < first + 32; ++range) {
    marked |= static_cast<std::uint32_t>(
        bits_between(ranges[range].begin - first, ranges[range].end - first));
  }
  bits[word] = marked;
}

// Executed by a block: writes what the head's sets hold together, ascending; returns how much that is.
__device__ int unite(const ModalityWork& w, std::uint32_t* kept, int head, BlockScan& scan,
                     std::int32_t* list) {
  const std::uint32_t sets = w.sets[head];
  int before = 0;
  const int words = (w.geometry.kv_len + 31) / 32;
  for (int base = 0; base < words; base += kSelectThreads) {
    const int word = base + static_cast<int>(threadIdx.x);
    std::uint32_t bits = 0;
    for (std::uint32_t rest = word < words ? sets : 0; rest != 0; rest &= rest - 1) {
      bits |= w.set_of(kept, head, __ffs(static_cast<int>(rest)) - 1)[word];
    }
    int total;
    int at = before + scan.exclusive(__popc(bits), total);
    for (; bits != 0; bits &= bits - 1) {
      list[at++] = word * 32 + __ffs(static_cast<int>(bits)) - 1;
    }
    before += total;
  }
  __syncthreads();
  return before;
}

// A block a head: writes the head.
__global__ void __launch_bounds__(kSelectThreads)
    finish_kernel(const __grid_constant__ ModalityWork w) {
  __shared__ BlockScan::Shared scan_memory;
  __shared__ long long totals[2];
  const int head = static_cast<int>(blockIdx.x);
  DeviceHead result;
  if (w.sets[head] == 0) {
    if (threadIdx.x != 0 || w.leaves_out[head] == 0) return;
    result.kind = HeadIndex::Kind::kBlock;
    result.bit_block_size = static_cast<std::int32_t>(kKeyBlock);
    result.bit_words = w.block_words;
    result.block_id_begin = w.bits_begin + head * w.bits_of_head();
    w.heads[head] = result;
    return;
  }
  result.kind = HeadIndex::Kind::kDiagonal;
  result.column_begin = w.column_begin + static_cast<std::int64_t>(head) * w.columns_of_head;
  result.run_begin = w.run_begin + static_cast<std::int64_t>(head) * w.runs_of_head;
  DeviceRun* runs = w.runs + result.run_begin;
  std::int32_t* list = w.lists + head * (w.stride + kBoxKeys);
  BlockScan scan(scan_memory);
  result.column_count = unite(w, w.kept_columns, head, scan, w.columns + result.column_begin);
  const int offsets = unite(w, w.kept_offsets, head, scan, list);
  result.run_count = merge_offsets(list, offsets, scan, runs);
  const bool dense =
      dense_is_cheaper(w.geometry, runs, result.run_count, result.column_count, scan, list, totals);
  if (threadIdx.x == 0 && !dense) w.heads[head] = result;
}

void require_length(const char* what, std::int64_t value, std::int64_t most) {
  if (value >= 0 && value <= most) return;
  throw InvalidArgument(std::string(what) + " of a sequence by modality is " +
                        std::to_string(value) + "; legal: 0 to " + std::to_string(most));
}

std::int32_t to_count(std::int64_t value) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(value, 0, kMaxPosition));
}

// A call, laid out in the workspace.
struct Layout {
  ModalityWork work;  // but for what is of a sequence
  LastQPlan plan;
  DeviceHead* heads = nullptr;  // [batch][q_heads]
  KeyRange* ranges = nullptr;   // visual ones of a sequence
  std::uint8_t* wanted = nullptr;

  Layout(const Problem& problem, const ModalityRule& rule,
         std::span<const ModalitySequence> sequences, MemoryPieces& workspace) {
    check_problem(problem);
    if (!problem.causal || problem.mask != nullptr) {
      throw Unsupported("an index by modality takes causal attention without a mask only");
    }
    if (static_cast<std::int64_t>(sequences.size()) != problem.batch) {
      throw InvalidArgument("there are " + std::to_string(sequences.size()) +
                            " sequences by modality; legal: the batch, " +
                            std::to_string(problem.batch));
    }
    measure(problem, rule, sequences);
    const std::int64_t batch_heads = static_cast<std::int64_t>(problem.batch) * problem.q_heads;
    plan_pass(problem);
    const std::int64_t flying = static_cast<std::int64_t>(plan.units) * problem.group;
    ModalityWork& w = work;
    heads = workspace.take<DeviceHead>(batch_heads);
    ranges = workspace.take<KeyRange>(most_ranges_);
    wanted = workspace.take<std::uint8_t>(problem.q_heads);
    w.columns = workspace.take<std::int32_t>(
        checked_mul(batch_heads, w.columns_of_head, "the columns of an index"));
    w.runs =
        workspace.take<DeviceRun>(checked_mul(batch_heads, w.runs_of_head, "the runs of an index"));
    w.visual_keys = workspace.take<std::uint32_t>(w.words);
    for (int s = 0; s < most_samples_; ++s) {
      w.sums[s] = allocate_class_sums(problem, plan, s > 0 ? &w.sums[0] : nullptr, workspace);
    }
    w.kept_columns = workspace.take<std::uint32_t>(flying * kMostSets * w.words);
    w.kept_offsets = workspace.take<std::uint32_t>(flying * kMostSets * w.words);
    w.sets = workspace.take<std::uint32_t>(flying);
    w.found = workspace.take<int>(flying);
    w.leaves_out = workspace.take<int>(flying);
    w.lists = workspace.take<std::int32_t>(flying * (w.stride + kBoxKeys));
    const std::int64_t rows =
        flying * std::max<std::int64_t>(most_sets_, grid_selection_rows(most_candidates_));
    w.parts = plan_parts(problem.kv_tokens, rows);
    w.rows.memory = workspace.take<SelectMemory>(rows);
    w.rows.ranks = workspace.take<std::uint32_t>(rows * w.parts.parts * w.parts.candidates);
    w.shares = workspace.take<ModalityShares>(flying * ModalityShares::kGroups * w.parts.parts);
    if (most_candidates_ == 0) return;
    w.bits = workspace.take<std::uint32_t>(
        checked_mul(batch_heads, w.bits_of_head(), "the bits of an index"));
    w.candidates = workspace.take<GridCandidate>(most_candidates_);
    w.heavy_tokens = workspace.take<std::int32_t>(flying * w.list_room);
    w.heavy_masses = workspace.take<unsigned long long>(flying * w.list_room);
    w.fits = workspace.take<GridFit>(flying * most_candidates_ * kFoldSlices);
    w.lines = workspace.take<std::uint32_t>(flying * w.words);
    w.everywhere = workspace.take<std::uint32_t>(flying * w.block_words);
  }

  // The work of a sequence.
  ModalityWork of_sequence(const Problem& problem, const ModalityRule& rule,
                           const ModalitySequence& sequence) const {
    ModalityWork w = work;
    w.geometry.q_len = static_cast<std::int32_t>(sequence.q_len);
    w.geometry.kv_len = static_cast<std::int32_t>(sequence.kv_len);
    w.geometry.window = problem.window;
    w.kind = kind_of(rule, sequence);
    w.keeps_light = sequence.vertical_slash;
    w.vertical = to_count(rule.vertical);
    w.slash = to_count(rule.slash);
    w.n_local = to_count(rule.n_local);
    w.initial_keys = to_count(sequence.initial_keys);
    w.grid_share = rule.grid_share;
    w.min_gain = rule.min_gain;
    const auto place = [](const std::optional<std::size_t>& sample) {
      return sample ? static_cast<std::int32_t>(*sample) : -1;
    };
    w.text = place(sequence.text_rows);
    w.visual = place(sequence.visual_rows);
    w.last = place(sequence.last_rows);
    w.find_sets();
    for (std::size_t s = 0; s < sequence.samples.size(); ++s) {
      w.keys_of_sample[s] =
          std::max(w.geometry.position(static_cast<std::int32_t>(sequence.samples[s].end)), 0);
    }
    if (sequence.visual_rows) {
      w.sampled_position = w.geometry.position(
          static_cast<std::int32_t>(sequence.samples[*sequence.visual_rows].begin));
    }
    w.candidate_count = static_cast<std::int32_t>(candidates_of(rule, sequence).size());
    return w;
  }

  static Kind kind_of(const ModalityRule& rule, const ModalitySequence& sequence) {
    return sequence.vertical_slash ? Kind::kVerticalSlash : rule.kind;
  }

  // Segments that may have lines.
  static std::vector<GridCandidate> candidates_of(const ModalityRule& rule,
                                                  const ModalitySequence& sequence) {
    std::vector<GridCandidate> candidates;
    const Kind kind = kind_of(rule, sequence);
    if (kind != Kind::kAuto && kind != Kind::kGrid) return candidates;
    std::int64_t room = 0;
    for (const ModalitySequence::Grid& grid : sequence.grids) {
      if (grid.first_stride > grid.last_stride) continue;
      const std::int64_t count = std::min(grid.region.end - grid.region.begin, rule.fold_columns);
      const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
      candidates.push_back({narrow(grid.tokens.begin), narrow(grid.tokens.end),
                            narrow(grid.region.begin), narrow(grid.region.end),
                            narrow(grid.first_stride), narrow(grid.last_stride), narrow(room),
                            narrow(count)});
      room += count;
    }
    return candidates;
  }

 private:
  // What the sequences need at most.
  void measure(const Problem& problem, const ModalityRule& rule,
               std::span<const ModalitySequence> sequences) {
    ModalityWork& w = work;
    int units = 1;  // whole budgets that a head may unite
    for (const ModalitySequence& sequence : sequences) {
      require_length("q_len", sequence.q_len, problem.q_tokens);
      require_length("kv_len", sequence.kv_len, problem.kv_tokens);
      require_length("the number of samples", std::ssize(sequence.samples), kMostSamples);
      if (sequence.dense) continue;
      most_ranges_ = std::max(most_ranges_, std::ssize(sequence.visual));
      most_samples_ = std::max(most_samples_, static_cast<int>(sequence.samples.size()));
      const std::vector<GridCandidate> candidates = candidates_of(rule, sequence);
      most_candidates_ = std::max(most_candidates_, std::ssize(candidates));
      if (!candidates.empty()) {
        w.list_room =
            std::max(w.list_room, candidates.back().list_begin + candidates.back().list_count);
      }
      const ModalityWork own = of_sequence(problem, rule, sequence);
      most_sets_ = std::max(most_sets_, std::popcount(own.sets_of(own.kind)));
      for (const Kind kind : {Kind::kQBoundary, Kind::k2DBoundary}) {
        if (own.kind != Kind::kAuto && own.kind != kind) continue;
        units = std::max(units, std::popcount(own.sets_of(kind)));
      }
    }
    const std::int64_t kv_tokens = problem.kv_tokens;
    const auto round = [](std::int64_t n) { return (n + kBoxKeys - 1) / kBoxKeys * kBoxKeys; };
    const std::int64_t columns =
        units * std::max<std::int64_t>(to_count(rule.vertical), kForcedColumns);
    w.columns_of_head = static_cast<std::int32_t>(round(std::min(columns, kv_tokens)));
    // Runs begin more than a row block apart.
    w.runs_of_head = static_cast<std::int32_t>(kv_tokens / (kRowBlock + 1) + 1);
    w.row_blocks = static_cast<std::int32_t>((problem.q_tokens + kRowBlock - 1) / kRowBlock);
    w.block_words = static_cast<std::int32_t>(((kv_tokens + kKeyBlock - 1) / kKeyBlock + 31) / 32);
  }

  // Sums of more heads than fit in so many bytes are made one after the other.
  void plan_pass(const Problem& problem) {
    constexpr std::int64_t kBytes = std::int64_t{32} << 20;
    Problem one = problem;
    one.batch = 1;
    const std::int64_t of_key = most_samples_ * (1 + kKeyClasses) * sizeof(float) +
                                sizeof(std::int32_t) + 2 * kMostSets / 8;
    plan = plan_last_q(one);
    constexpr std::int64_t kMostHeads = 1 << 14;  // a grid has no more rows than four times that
    const std::int64_t units =
        std::min(kBytes / (of_key * problem.kv_tokens), kMostHeads) / problem.group;
    static_cast<RowPassPlan&>(plan) = plan_row_pass(one, problem.kv_tokens, units);
    work.stride = plan.stride;
    work.words = static_cast<std::int32_t>(class_keys(plan) / 32);
  }

  std::int64_t most_ranges_ = 0;
  std::int64_t most_candidates_ = 0;
  int most_samples_ = 1;
  int most_sets_ = 1;
};

// Sequence b alone, as far as the last row of a sample sees it, with the sample's rows.
Problem problem_of_sample(const Problem& problem, int b, const TokenRange& sample, int keys) {
  Problem one = problem;
  one.batch = 1;
  one.q_lens = nullptr;
  one.kv_lens = nullptr;
  one.q.data += (b * problem.q.batch_stride + sample.begin * problem.q.token_stride) *
                dtype_size(problem.q.dtype);
  if (problem.block_table != nullptr) {
    one.block_table += static_cast<std::int64_t>(b) * problem.pages_per_sequence;
  } else {
    one.k.data += b * problem.k.batch_stride * dtype_size(problem.k.dtype);
  }
  one.q_tokens = static_cast<std::int32_t>(sample.end - sample.begin);
  one.kv_tokens = keys;
  return one;
}

// Enqueues the heads of one sequence.
void build_sequence(const Problem& problem, int b, const ModalityRule& rule,
                    const ModalitySequence& sequence, const Layout& layout, cudaStream_t stream) {
  ModalityWork w = layout.of_sequence(problem, rule, sequence);
  std::vector<KeyRange> ranges;
  for (const TokenRange& run : sequence.visual) {
    ranges.push_back({static_cast<std::int32_t>(run.begin), static_cast<std::int32_t>(run.end)});
  }
  send(ranges.data(), static_cast<std::int64_t>(ranges.size() * sizeof(KeyRange)), layout.ranges,
       stream);
  mark_kernel<<<(w.words + kMarkThreads - 1) / kMarkThreads, kMarkThreads, 0, stream>>>(
      layout.ranges, static_cast<int>(ranges.size()), w.words, w.visual_keys);
  check(cudaGetLastError(), "marking visual keys");
  const std::vector<GridCandidate> candidates = Layout::candidates_of(rule, sequence);
  send(candidates.data(), static_cast<std::int64_t>(candidates.size() * sizeof(GridCandidate)),
       w.candidates, stream);
  for (int first = 0; first < problem.kv_heads; first += layout.plan.units) {
    const int count = std::min(layout.plan.units, problem.kv_heads - first);
    const std::int64_t head =
        static_cast<std::int64_t>(b) * problem.q_heads + first * problem.group;
    w.head_count = count * problem.group;
    w.heads = layout.heads + head;
    w.column_begin = head * w.columns_of_head;
    w.run_begin = head * w.runs_of_head;
    w.bits_begin = head * w.bits_of_head();
    const auto clear = [&](auto* values, std::int64_t of_head) {
      if (values == nullptr) return;
      check(cudaMemsetAsync(values, 0, w.head_count * of_head * sizeof(*values), stream),
            "clearing an index");
    };
    clear(w.kept_columns, kMostSets * w.words);
    clear(w.kept_offsets, kMostSets * w.words);
    clear(w.lines, w.words);
    clear(w.found, 1);
    clear(w.leaves_out, 1);
    for (std::size_t s = 0; s < sequence.samples.size(); ++s) {
      const Problem sample =
          problem_of_sample(problem, b, sequence.samples[s], w.keys_of_sample[s]);
      estimate_by_class(sample, layout.plan, w.visual_keys, layout.wanted, first, count, w.sums[s],
                        stream);
    }
    find_lines(w, stream);
    select_columns(w, stream);
    choose_sets(w, stream);
    select_offsets(w, stream);
    keep_grid_blocks(w, stream);
    finish_kernel<<<w.head_count, kSelectThreads, 0, stream>>>(w);
    check(cudaGetLastError(), "finishing an index by modality");
  }
}

}  // namespace

std::int64_t modality_index_bytes(const Problem& problem, const ModalityRule& rule,
                                  std::span<const ModalitySequence> sequences) {
  MemoryPieces counted;
  const Layout layout(problem, rule, sequences, counted);
  return counted.used();
}

DeviceIndex build_modality_index(const Problem& problem, const ModalityRule& rule,
                                 std::span<const ModalitySequence> sequences,
                                 const IndexWorkspace& workspace, cudaStream_t stream) {
  MemoryPieces given(workspace.data);
  const Layout layout(problem, rule, sequences, given);
  check_workspace(workspace, given.used());
  const std::size_t heads = static_cast<std::size_t>(problem.batch) * problem.q_heads;
  // Heads that nobody writes are dense.
  static_assert(static_cast<int>(HeadIndex::Kind::kDense) == 0);
  check(cudaMemsetAsync(layout.heads, 0, heads * sizeof(DeviceHead), stream), "clearing an index");
  check(cudaMemsetAsync(layout.wanted, 1, problem.q_heads, stream), "choosing heads");
  for (int b = 0; b < problem.batch; ++b) {
    if (!sequences[b].dense) {
      build_sequence(problem, b, rule, sequences[b], layout, stream);
    }
  }
  DeviceIndex index;
  index.heads = layout.heads;
  index.runs = layout.work.runs;
  index.columns = layout.work.columns;
  index.block_bits = layout.work.bits;
  index.column_capacity =
      static_cast<std::int64_t>(problem.batch) * problem.q_heads * layout.work.columns_of_head;
  return index;
}

}  // namespace minference::cuda

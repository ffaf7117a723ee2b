#include "minference/linear.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "attention/cpu/kernel_table.h"
#include "core/aligned_buffer.h"
#include "core/parallel.h"
#include "minference/error.h"

namespace minference {
namespace {

using namespace cpu;  // NOLINT(google-build-using-namespace): built on the CPU tile kernels

constexpr std::int64_t kChunk = LinearWeight::kUnpackChunk;
constexpr std::int64_t kGroup = 16;        // chunks that one kernel call sums up
constexpr std::int64_t kMaxColumns = 128;  // weight rows that a task unpacks
// Of a task's packed weights, which each row block passes by: what a second-level cache holds.
constexpr std::int64_t kWeightBytes = std::int64_t{1} << 20;
constexpr std::int64_t kTasksPerThread = 4;

// Operands are cut into chunks along the depth, which lie one after the other: of the activations
// [row block][chunk][kTileRows][chunk depth], of a task's weights [chunk][panel][...].
class Product {
 public:
  Product(const float* a, std::int64_t a_stride, std::int64_t tokens, const LinearWeight& weight,
          float* c, std::int64_t c_stride, const KernelTable& kernels, int threads)
      : a_(a),
        a_stride_(a_stride),
        tokens_(tokens),
        weight_(weight),
        c_(c),
        c_stride_(c_stride),
        kernels_(kernels),
        threads_(resolve_threads(threads)),
        depth_(round_up(weight.cols, kernels.dim_align)),
        activations_(round_up(tokens, kTileRows) * depth_ * kernels.element_size),
        scratch_(threads_) {}

  void run() {
    parallel_for(tokens_, threads_, [&](std::int64_t row, int) { convert(row); });
    const std::int64_t wanted = kTasksPerThread * threads_;
    std::int64_t columns = kMaxColumns;
    while (columns > kPanelWidth && (columns * depth_ * kernels_.element_size > kWeightBytes ||
                                     weight_.rows / columns < wanted)) {
      columns /= 2;
    }
    const std::int64_t column_tasks = (weight_.rows + columns - 1) / columns;
    // Splitting the tokens unpacks the weight again, so it is the second choice.
    const std::int64_t row_blocks = (tokens_ + kTileRows - 1) / kTileRows;
    const std::int64_t splits = std::clamp<std::int64_t>(threads_ / column_tasks, 1,
                                                         std::max<std::int64_t>(row_blocks / 4, 1));
    const std::int64_t blocks_per_split = (row_blocks + splits - 1) / splits;
    parallel_for(column_tasks * splits, threads_, [&](std::int64_t task, int thread) {
      const std::int64_t first = task / splits * columns;
      const std::int64_t block = task % splits * blocks_per_split;
      multiply(first, std::min(columns, weight_.rows - first), block,
               std::min(row_blocks, block + blocks_per_split), scratch_[thread]);
    });
  }

 private:
  struct Scratch {
    AlignedBuffer<float> unpacked;     // [kMaxColumns][kChunk]
    AlignedBuffer<std::byte> weights;  // packed panels
    AlignedBuffer<float> sums;         // [kTileRows][kMaxColumns]
  };

  // Depth of the chunk that starts at `begin`, padded.
  std::int64_t chunk_depth(std::int64_t begin) const { return std::min(kChunk, depth_ - begin); }

  std::byte* activations(std::int64_t row_block, std::int64_t begin) {
    return activations_.data() + (row_block * depth_ + begin) * kTileRows * kernels_.element_size;
  }

  void convert(std::int64_t row) {
    for (std::int64_t begin = 0; begin < weight_.cols; begin += kChunk) {
      const std::int64_t depth = chunk_depth(begin);
      kernels_.convert_row(
          a_ + row * a_stride_ + begin, std::min(kChunk, weight_.cols - begin), depth,
          activations(row / kTileRows, begin) + row % kTileRows * depth * kernels_.element_size);
    }
  }

  // Unpacks weight rows [first, first + count).
  void unpack(std::int64_t first, std::int64_t count, Scratch& scratch) const {
    if (scratch.unpacked.size() == 0) {
      scratch.unpacked = AlignedBuffer<float>(kMaxColumns * kChunk);
      scratch.weights = AlignedBuffer<std::byte>(kMaxColumns * depth_ * kernels_.element_size);
      scratch.sums = AlignedBuffer<float>(kTileRows * kMaxColumns);
    }
    const std::int64_t width = round_up(count, kKeyGranule);
    for (std::int64_t begin = 0; begin < weight_.cols; begin += kChunk) {
      const std::int64_t length = std::min(kChunk, weight_.cols - begin);
      const void* rows[kMaxColumns];
      for (std::int64_t n = 0; n < count; ++n) {
        float* out = scratch.unpacked.data() + n * kChunk;
        weight_.unpack(weight_.context, first + n, begin, length, out);
        rows[n] = out;
      }
      kernels_.pack_keys(rows, DType::kF32, count, length, chunk_depth(begin),
                         scratch.weights.data() + begin * width * kernels_.element_size);
    }
  }

  // c[row blocks][first ... first + count)
  void multiply(std::int64_t first, std::int64_t count, std::int64_t block_begin,
                std::int64_t block_end, Scratch& scratch) {
    if (block_begin >= block_end) return;
    unpack(first, count, scratch);
    kernels_.enter();
    const std::int64_t panels = (count + kPanelWidth - 1) / kPanelWidth;
    const std::int64_t width = round_up(count, kKeyGranule);
    for (std::int64_t block = block_begin; block < block_end; ++block) {
      const std::int64_t rows = std::min(kTileRows, tokens_ - block * kTileRows);
      // Not in c itself: kernels write whole tiles of 16 columns and, with AMX, of 16 rows, and
      // rows of c may lie a power of two apart, which a set of the cache does not hold.
      float* sums = scratch.sums.data();
      for (std::int64_t begin = 0; begin < depth_;) {
        // A group ends before a last chunk of another depth.
        const std::int64_t depth = chunk_depth(begin);
        const void* weights[kGroup];
        std::int64_t n = 0;
        const std::int64_t group_begin = begin;
        for (; n < kGroup && begin < depth_ && chunk_depth(begin) == depth; ++n, begin += depth) {
          weights[n] = scratch.weights.data() + begin * width * kernels_.element_size;
        }
        kernels_.gemm(activations(block, group_begin), kTileRows * depth, rows, weights, n, depth,
                      panels, sums, kMaxColumns, group_begin > 0);
      }
      float* out = c_ + block * kTileRows * c_stride_ + first;
      for (std::int64_t r = 0; r < rows; ++r) {
        std::memcpy(out + r * c_stride_, sums + r * kMaxColumns,
                    static_cast<std::size_t>(count) * sizeof(float));
      }
    }
    kernels_.leave();
  }

  const float* a_;
  std::int64_t a_stride_;
  std::int64_t tokens_;
  const LinearWeight& weight_;
  float* c_;
  std::int64_t c_stride_;
  const KernelTable& kernels_;
  int threads_;
  std::int64_t depth_;  // padded input features
  AlignedBuffer<std::byte> activations_;
  std::vector<Scratch> scratch_;  // [thread]
};

}  // namespace

void linear_cpu(const float* a, std::int64_t a_stride, std::int64_t tokens,
                const LinearWeight& weight, float* c, std::int64_t c_stride, IsaLevel level,
                int threads) {
  const auto require = [](bool ok, const char* name, std::int64_t value, const char* legal) {
    if (!ok) {
      throw InvalidArgument("linear: " + std::string(name) + " is " + std::to_string(value) +
                            "; legal: " + legal);
    }
  };
  require(tokens >= 1, "tokens", tokens, "1 or more");
  require(weight.rows >= 1, "weight rows", weight.rows, "1 or more");
  require(weight.cols >= 1, "weight cols", weight.cols, "1 or more");
  require(a_stride >= weight.cols, "a_stride", a_stride, "at least the weight's cols");
  require(c_stride >= weight.rows, "c_stride", c_stride, "at least the weight's rows");
  if (a == nullptr || c == nullptr || weight.unpack == nullptr) {
    throw InvalidArgument("linear: a, c and the weight's unpack must not be null");
  }
  Product(a, a_stride, tokens, weight, c, c_stride, *kernel_table(level), threads).run();
}

void linear(const float* a, std::int64_t a_stride, std::int64_t tokens, const LinearWeight& weight,
            float* c, std::int64_t c_stride, Precision precision, int threads) {
  linear_cpu(a, a_stride, tokens, weight, c, c_stride, choose_isa(precision != Precision::kF32),
             threads);
}

}  // namespace minference

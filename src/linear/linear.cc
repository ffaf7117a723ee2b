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
// Of a task's packed weights, which each row block passes by: what a second-level cache holds. Deeper
// weights are done in slices, not in fewer columns: those would fetch the activations more often.
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
    while (columns_ > kPanelWidth && weight_.rows / columns_ < wanted) columns_ /= 2;
    const std::int64_t longest = kWeightBytes / (task_width() * kernels_.element_size);
    const std::int64_t slices = (depth_ + longest - 1) / longest;
    slice_ = round_up((depth_ + slices - 1) / slices, kChunk);
    const std::int64_t column_tasks = (weight_.rows + columns_ - 1) / columns_;
    // Splitting the tokens unpacks the weight again, so it is the second choice.
    const std::int64_t row_blocks = (tokens_ + kTileRows - 1) / kTileRows;
    const std::int64_t splits = std::clamp<std::int64_t>(threads_ / column_tasks, 1,
                                                         std::max<std::int64_t>(row_blocks / 4, 1));
    const std::int64_t blocks_per_split = (row_blocks + splits - 1) / splits;
    parallel_for(column_tasks * splits, threads_, [&](std::int64_t task, int thread) {
      const std::int64_t first = task / splits * columns_;
      const std::int64_t block = task % splits * blocks_per_split;
      multiply(first, std::min(columns_, weight_.rows - first), block,
               std::min(row_blocks, block + blocks_per_split), scratch_[thread]);
    });
  }

 private:
  struct Scratch {
    AlignedBuffer<float> unpacked;     // [kKeyGranule][kChunk]
    AlignedBuffer<std::byte> weights;  // packed panels
    AlignedBuffer<float> sums;         // [kTileRows][kMaxColumns]
  };

  // Packed weight rows of a whole task.
  std::int64_t task_width() const { return round_up(columns_, kKeyGranule); }

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

  // Unpacks a slice of weight rows [first, first + count).
  void unpack(std::int64_t first, std::int64_t count, std::int64_t slice_begin,
              std::int64_t slice_end, Scratch& scratch) const {
    if (scratch.unpacked.size() == 0) {
      scratch.unpacked = AlignedBuffer<float>(kKeyGranule * kChunk);
      scratch.weights = AlignedBuffer<std::byte>(task_width() * slice_ * kernels_.element_size);
      scratch.sums = AlignedBuffer<float>(kTileRows * kMaxColumns);
    }
    const std::int64_t width = round_up(count, kKeyGranule);
    // A few rows from end to end: each is a stream that the processor can fetch ahead.
    for (std::int64_t n = 0; n < count; n += kKeyGranule) {
      const std::int64_t some = std::min(kKeyGranule, count - n);
      for (std::int64_t begin = slice_begin; begin < slice_end; begin += kChunk) {
        const std::int64_t length = std::min(kChunk, weight_.cols - begin);
        const std::int64_t depth = chunk_depth(begin);
        const void* rows[kKeyGranule];
        for (std::int64_t i = 0; i < some; ++i) {
          float* out = scratch.unpacked.data() + i * kChunk;
          weight_.unpack(weight_.context, first + n + i, begin, length, out);
          rows[i] = out;
        }
        kernels_.pack_keys(rows, DType::kF32, some, length, depth,
                           scratch.weights.data() +
                               ((begin - slice_begin) * width + n * depth) * kernels_.element_size);
      }
    }
  }

  // c[row blocks][first ... first + count)
  void multiply(std::int64_t first, std::int64_t count, std::int64_t block_begin,
                std::int64_t block_end, Scratch& scratch) {
    if (block_begin >= block_end) return;
    for (std::int64_t slice = 0; slice < depth_; slice += slice_) {
      const std::int64_t slice_end = std::min(slice + slice_, depth_);
      unpack(first, count, slice, slice_end, scratch);
      kernels_.enter();
      for (std::int64_t block = block_begin; block < block_end; ++block) {
        multiply_block(count, slice, slice_end, block, scratch);
        add_sums(scratch.sums.data(), first, count, block, slice > 0);
      }
      kernels_.leave();
    }
  }

  // A row block's product with a slice, into the sums of `scratch`. Not into c itself: kernels write
  // whole tiles of 16 columns and, with AMX, of 16 rows, and rows of c may lie a power of two apart,
  // which a set of the cache does not hold.
  void multiply_block(std::int64_t count, std::int64_t slice_begin, std::int64_t slice_end,
                      std::int64_t block, Scratch& scratch) {
    const std::int64_t panels = (count + kPanelWidth - 1) / kPanelWidth;
    const std::int64_t width = round_up(count, kKeyGranule);
    const std::int64_t rows = std::min(kTileRows, tokens_ - block * kTileRows);
    for (std::int64_t begin = slice_begin; begin < slice_end;) {
      // A group ends before a last chunk of another depth.
      const std::int64_t depth = chunk_depth(begin);
      const void* weights[kGroup];
      std::int64_t n = 0;
      const std::int64_t group_begin = begin;
      for (; n < kGroup && begin < slice_end && chunk_depth(begin) == depth; ++n, begin += depth) {
        weights[n] = scratch.weights.data() + (begin - slice_begin) * width * kernels_.element_size;
      }
      kernels_.gemm(activations(block, group_begin), kTileRows * depth, rows, weights, n, depth,
                    panels, scratch.sums.data(), kMaxColumns, group_begin > slice_begin);
    }
  }

  // Writes or adds a row block's sums to c.
  void add_sums(const float* sums, std::int64_t first, std::int64_t count, std::int64_t block,
                bool add) {
    const std::int64_t rows = std::min(kTileRows, tokens_ - block * kTileRows);
    float* out = c_ + block * kTileRows * c_stride_ + first;
    for (std::int64_t r = 0; r < rows; ++r, out += c_stride_, sums += kMaxColumns) {
      if (add) {
        for (std::int64_t i = 0; i < count; ++i) out[i] += sums[i];
      } else {
        std::memcpy(out, sums, static_cast<std::size_t>(count) * sizeof(float));
      }
    }
  }

  const float* a_;
  std::int64_t a_stride_;
  std::int64_t tokens_;
  const LinearWeight& weight_;
  float* c_;
  std::int64_t c_stride_;
  const KernelTable& kernels_;
  int threads_;
  std::int64_t depth_;                  // padded input features
  std::int64_t slice_ = 0;              // of them, done at a time
  std::int64_t columns_ = kMaxColumns;  // weight rows of a task
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

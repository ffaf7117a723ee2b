// What the tests of indices on the device share: problems with random or small-integer tensors on both
// sides, and the comparison of two indices.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "core/float16.h"
#include "index/cuda/build_index.h"
#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference::cuda_test {

inline void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
#define REQUIRE_CUDA(call) ::minference::cuda_test::require(call, #call)

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) {
    REQUIRE_CUDA(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    REQUIRE_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

template <class T>
std::vector<T> to_host(const T* from, std::size_t count) {
  std::vector<T> values(count);
  REQUIRE_CUDA(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

struct Shape {
  std::string name;
  int batch = 1;
  int q_tokens = 0;
  int kv_tokens = 0;
  int q_heads = 1;
  int kv_heads = 1;
  int dim = 64;
  DType dtype = DType::kBF16;
  std::vector<std::int64_t> q_lens;
  std::vector<std::int64_t> kv_lens;
  int window = 0;
  float soft_cap = 0;
  float scale = 0;
  bool causal = true;
  int page_size = 0;
  int extra_stride = 0;      // elements between the rows of k and q
  bool heads_first = false;  // memory order [batch, heads, tokens, dim]
};

// Ways in which tensors may lie: pages, strides that no vector load follows, heads before tokens.
inline std::vector<Shape> storage_shapes(int q_tokens, int kv_tokens) {
  Shape shape{.q_tokens = q_tokens, .kv_tokens = kv_tokens, .q_heads = 4, .kv_heads = 2};
  Shape unaligned = shape;
  unaligned.name = "unaligned";
  unaligned.extra_stride = 3;
  shape.batch = 2;
  Shape heads_first = shape;
  heads_first.name = "heads first";
  heads_first.heads_first = true;
  shape.name = "paged";
  shape.q_lens = {q_tokens, q_tokens - 100};
  shape.kv_lens = {kv_tokens - 10, kv_tokens};
  shape.page_size = 48;
  return {shape, unaligned, heads_first};
}

// Sequences of other lengths than the tensors', one of them without queries.
inline Shape ragged_shape() {
  return {.name = "ragged",
          .batch = 5,
          .q_tokens = 700,
          .kv_tokens = 4000,
          .q_heads = 4,
          .kv_heads = 2,
          .q_lens = {700, 3, 64, 0, 650},
          .kv_lens = {4000, 1900, 64, 2000, 650}};
}

// Value of element d of a query (kv false) or key at `token` of head h.
using Fill = std::function<float(bool is_key, int b, int token, int h, int d)>;

// One call of attention(), on the host and on the device.
class Inputs {
 public:
  Inputs(const Shape& shape, const Fill& fill) : shape_(shape) {
    fill_tensor(false, fill, q_host_, input.q, problem.q, q_device_);
    fill_tensor(true, fill, k_host_, input.k, problem.k, k_device_);
    input.v = input.k;
    input.q_lens = shape_.q_lens;
    input.kv_lens = shape_.kv_lens;
    params.sliding_window = shape.window;
    params.soft_cap = shape.soft_cap;
    params.scale = shape.scale;
    params.causal = shape.causal;
    params.precision = Precision::kF32;
    problem.v = problem.k;
    problem.batch = shape.batch;
    problem.q_tokens = shape.q_tokens;
    problem.kv_tokens = shape.kv_tokens;
    problem.q_heads = shape.q_heads;
    problem.kv_heads = shape.kv_heads;
    problem.group = shape.q_heads / shape.kv_heads;
    problem.dim = shape.dim;
    problem.v_dim = shape.dim;
    problem.window = shape.window;
    problem.causal = shape.causal;
    problem.soft_cap = shape.soft_cap;
    problem.scale =
        shape.scale != 0 ? shape.scale : 1.0F / std::sqrt(static_cast<float>(shape.dim));
    if (!shape.q_lens.empty()) problem.q_lens = upload_lens(shape.q_lens, q_lens_);
    if (!shape.kv_lens.empty()) problem.kv_lens = upload_lens(shape.kv_lens, kv_lens_);
    if (shape.page_size > 0) {
      input.block_table = table_;
      input.pages_per_sequence = pages_per_sequence();
      table_device_ = std::make_unique<DeviceArray<std::int32_t>>(table_);
      problem.block_table = table_device_->get();
      problem.page_size = shape.page_size;
      problem.pages_per_sequence = pages_per_sequence();
    }
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  AttentionInput input;
  AttentionParams params;
  cuda::Problem problem;

 private:
  int pages_per_sequence() const {
    return (shape_.kv_tokens + shape_.page_size - 1) / shape_.page_size;
  }

  void fill_tensor(bool is_key, const Fill& fill, std::vector<std::uint16_t>& host,
                   TensorView& view, cuda::DeviceTensor& tensor,
                   std::unique_ptr<DeviceArray<std::uint16_t>>& device) {
    const bool paged = is_key && shape_.page_size > 0;
    const int tokens = is_key ? shape_.kv_tokens : shape_.q_tokens;
    const int heads = is_key ? shape_.kv_heads : shape_.q_heads;
    const std::int64_t rows = paged ? shape_.page_size : tokens;
    const std::int64_t outer =
        paged ? static_cast<std::int64_t>(shape_.batch) * pages_per_sequence() : shape_.batch;
    const std::int64_t row = shape_.dim + shape_.extra_stride;
    view.dtype = shape_.dtype;
    view.shape = {outer, rows, heads, shape_.dim};
    view.strides = shape_.heads_first
                       ? std::array<std::int64_t, 4>{rows * heads * row, row, rows * row, 1}
                       : std::array<std::int64_t, 4>{rows * heads * row, heads * row, row, 1};
    const std::int64_t units = dtype_size(shape_.dtype) / 2;
    host.assign(outer * rows * heads * row * units, 0x7FC0);  // NaN where nobody may look
    if (paged) {
      table_.resize(outer);
      for (std::size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<std::int32_t>(i);
      std::shuffle(table_.begin(), table_.end(), std::mt19937(1));
    }
    for (int b = 0; b < shape_.batch; ++b) {
#pragma omp parallel for
      for (int t = 0; t < tokens; ++t) {
        const std::int64_t at =
            paged ? table_[b * pages_per_sequence() + t / shape_.page_size] * view.strides[0] +
                        t % shape_.page_size * view.strides[1]
                  : b * view.strides[0] + t * view.strides[1];
        for (int h = 0; h < heads; ++h) {
          for (int d = 0; d < shape_.dim; ++d) {
            const float value = fill(is_key, b, t, h, d);
            std::uint16_t* to = host.data() + (at + h * view.strides[2] + d) * units;
            if (shape_.dtype == DType::kF32) {
              // Numbers that bf16 has: the device rounds to it.
              const float rounded = bf16_to_f32(f32_to_bf16(value));
              std::memcpy(to, &rounded, sizeof(rounded));
            } else {
              *to = shape_.dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
            }
          }
        }
      }
    }
    view.data = host.data();
    device = std::make_unique<DeviceArray<std::uint16_t>>(host);
    tensor.data = reinterpret_cast<char*>(device->get());
    tensor.batch_stride = view.strides[0];
    tensor.token_stride = view.strides[1];
    tensor.head_stride = view.strides[2];
    tensor.dtype = shape_.dtype;
  }

  static const std::int32_t* upload_lens(const std::vector<std::int64_t>& lens,
                                         std::unique_ptr<DeviceArray<std::int32_t>>& to) {
    to = std::make_unique<DeviceArray<std::int32_t>>(
        std::vector<std::int32_t>(lens.begin(), lens.end()));
    return to->get();
  }

  Shape shape_;
  std::vector<std::uint16_t> q_host_;
  std::vector<std::uint16_t> k_host_;
  std::vector<std::int32_t> table_;
  std::unique_ptr<DeviceArray<std::uint16_t>> q_device_;
  std::unique_ptr<DeviceArray<std::uint16_t>> k_device_;
  std::unique_ptr<DeviceArray<std::int32_t>> q_lens_;
  std::unique_ptr<DeviceArray<std::int32_t>> kv_lens_;
  std::unique_ptr<DeviceArray<std::int32_t>> table_device_;
};

// A number in [0, 1) that depends on all arguments and nothing else.
inline float hashed(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d,
                    std::uint64_t e) {
  std::uint64_t x = a;
  for (const std::uint64_t part : {b, c, d, e}) {
    x = (x ^ part) + 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
  }
  return static_cast<float>(x >> 40) / static_cast<float>(1 << 24);
}

// Queries and keys with heavy keys, and with directions that turn with the position, as real ones.
inline Fill random_fill(std::uint64_t seed, int dim) {
  return [seed, dim](bool is_key, int b, int t, int h, int d) {
    const float u = hashed(seed + (is_key ? 1 : 0), b, t, h, d);
    const float v = hashed(seed + (is_key ? 3 : 2), b, t, h, d);
    float value = std::sqrt(-2 * std::log(u + 1e-7F)) * std::cos(6.2831853F * v);
    const float direction = hashed(seed + 9, b, 0, 0, d) - 0.5F;
    if (!is_key) value += 2 * direction;
    if (is_key && hashed(seed + 5, b, t, h, 0) < 0.01F) value += 4 * direction;
    const float angle =
        static_cast<float>(t) / static_cast<float>(std::pow(1e4, d / 2 * 2.0 / dim));
    return value + (d % 2 == 0 ? std::cos(angle) : std::sin(angle));
  };
}

// The block lists of a head, `place` in the whole batch, whose blocks are bits.
inline void read_bits(const cuda::Problem& problem, const cuda::DeviceIndex& device,
                      const cuda::DeviceHead& from, int place, std::int64_t q_blocks,
                      HeadIndex& head) {
  const int b = place / problem.q_heads;
  const auto length = [&](const std::int32_t* lens, std::int32_t all) {
    return lens == nullptr ? all : to_host(lens + b, 1)[0];
  };
  const cuda::Geometry geometry{length(problem.q_lens, problem.q_tokens),
                                length(problem.kv_lens, problem.kv_tokens), problem.window,
                                problem.causal};
  const std::int64_t ratio = from.bit_block_size / kKeyBlock;
  const std::int64_t rows = (q_blocks + ratio - 1) / ratio;
  const std::vector<std::uint32_t> bits =
      to_host(device.block_bits + from.block_id_begin, rows * from.bit_words);
  head.block_begin.push_back(0);
  for (std::int64_t m = 0; m < q_blocks; ++m) {
    const auto first = static_cast<std::int32_t>(m * kRowBlock);
    const std::int32_t last = std::min(first + static_cast<int>(kRowBlock), geometry.q_len) - 1;
    for (std::int64_t n = geometry.first_key(first) / kKeyBlock;
         first <= last && n * kKeyBlock < geometry.end_key(last); ++n) {
      const std::int64_t block = n / ratio;
      if ((bits[m / ratio * from.bit_words + block / 32] >> (block % 32) & 1) != 0) {
        head.block_ids.push_back(static_cast<std::int32_t>(n));
      }
    }
    head.block_begin.push_back(static_cast<std::int64_t>(head.block_ids.size()));
  }
}

// An index on the device, read back.
inline SparseIndex read_back(const cuda::Problem& problem, const cuda::DeviceIndex& device,
                             std::int64_t q_blocks) {
  SparseIndex index;
  index.batch = problem.batch;
  index.q_heads = problem.q_heads;
  for (const cuda::DeviceHead& from :
       to_host(device.heads, static_cast<std::size_t>(problem.batch) * problem.q_heads)) {
    HeadIndex head;
    head.kind = from.kind;
    head.rounding = from.rounding;
    head.dense_last_rows = from.dense_last_rows;
    if (from.kind == HeadIndex::Kind::kDiagonal) {
      for (const std::int32_t c : to_host(device.columns + from.column_begin, from.column_count)) {
        head.columns.push_back(c);
      }
      for (const cuda::DeviceRun& run : to_host(device.runs + from.run_begin, from.run_count)) {
        head.runs.push_back({run.begin, run.end, run.stride});
      }
    } else if (from.kind == HeadIndex::Kind::kBlock && from.bit_block_size != 0) {
      read_bits(problem, device, from, static_cast<int>(index.heads.size()), q_blocks, head);
    } else if (from.kind == HeadIndex::Kind::kBlock) {
      for (const std::int32_t begin :
           to_host(device.block_rows + from.block_row_begin, q_blocks + 1)) {
        head.block_begin.push_back(begin);
      }
      head.block_ids = to_host(device.block_ids + from.block_id_begin, head.block_begin.back());
    }
    index.heads.push_back(std::move(head));
  }
  return index;
}

// What a head keeps, as one ascending list of numbers.
inline std::vector<std::int64_t> offsets_of(const HeadIndex& head) {
  std::vector<std::int64_t> offsets;
  for (const OffsetRun& run : head.runs) {
    for (std::int64_t o = run.begin; o < run.end; o += run.stride) offsets.push_back(o);
  }
  return offsets;
}
inline std::vector<std::int64_t> blocks_of(const HeadIndex& head) {
  std::vector<std::int64_t> blocks;
  for (std::size_t m = 0; m + 1 < head.block_begin.size(); ++m) {
    for (std::int64_t i = head.block_begin[m]; i < head.block_begin[m + 1]; ++i) {
      blocks.push_back((static_cast<std::int64_t>(m) << 32) + head.block_ids[i]);
    }
  }
  return blocks;
}

// Share of the larger list that both hold.
inline double overlap(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  std::vector<std::int64_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  const std::size_t most = std::max(a.size(), b.size());
  return most == 0 ? 1.0 : static_cast<double>(both.size()) / static_cast<double>(most);
}

struct Agreement {
  double columns = 1;
  double offsets = 1;
  double blocks = 1;
  int kinds_differ = 0;
  int dense_earlier = 0;
  int sparse = 0;
};

inline Agreement compare(const SparseIndex& a, const SparseIndex& b) {
  Agreement least;
  for (std::size_t i = 0; i < a.heads.size(); ++i) {
    const HeadIndex& x = a.heads[i];
    const HeadIndex& y = b.heads[i];
    // Runs in whole boxes cover more than the CPU counts: dense attention pays earlier.
    if (x.kind == HeadIndex::Kind::kDiagonal && y.kind == HeadIndex::Kind::kDense) {
      ++least.dense_earlier;
      continue;
    }
    if (x.kind != y.kind ||
        (x.rounding == RunRounding::kNone) != (y.rounding == RunRounding::kNone)) {
      ++least.kinds_differ;
      continue;
    }
    if (x.kind != HeadIndex::Kind::kDense) ++least.sparse;
    least.columns = std::min(least.columns, overlap(x.columns, y.columns));
    least.offsets = std::min(least.offsets, overlap(offsets_of(x), offsets_of(y)));
    least.blocks = std::min(least.blocks, overlap(blocks_of(x), blocks_of(y)));
  }
  return least;
}

using Build = std::function<cuda::DeviceIndex(cudaStream_t)>;

// The index built twice directly and once from a captured graph must be the same; returns it.
inline SparseIndex build_three_times(const cuda::Problem& problem, std::int64_t q_blocks,
                                     const Build& build, bool& same) {
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreate(&stream));
  std::vector<SparseIndex> results;
  for (int i = 0; i < 2; ++i) {
    const cuda::DeviceIndex index = build(stream);
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    results.push_back(read_back(problem, index, q_blocks));
  }
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const cuda::DeviceIndex index = build(stream);
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
  REQUIRE_CUDA(cudaStreamSynchronize(stream));
  results.push_back(read_back(problem, index, q_blocks));
  REQUIRE_CUDA(cudaGraphExecDestroy(executable));
  REQUIRE_CUDA(cudaGraphDestroy(graph));
  REQUIRE_CUDA(cudaStreamDestroy(stream));
  for (int i = 1; i < 3; ++i) {
    for (std::size_t h = 0; h < results[0].heads.size(); ++h) {
      const HeadIndex& a = results[0].heads[h];
      const HeadIndex& b = results[i].heads[h];
      same = same && a.kind == b.kind && a.columns == b.columns && offsets_of(a) == offsets_of(b) &&
             a.block_begin == b.block_begin && a.block_ids == b.block_ids;
    }
  }
  return results[0];
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Prints the time of a whole build, and that of each kernel it is made of, in microseconds.
inline void print_times(const std::string& name, const Build& build) {
  constexpr int kRuns = 15;
  cudaStream_t stream;
  REQUIRE_CUDA(cudaStreamCreate(&stream));
  cudaEvent_t begin;
  cudaEvent_t end;
  REQUIRE_CUDA(cudaEventCreate(&begin));
  REQUIRE_CUDA(cudaEventCreate(&end));
  const auto time = [&](auto&& body) {
    std::vector<double> times;
    for (int i = 0; i < kRuns + 3; ++i) {
      REQUIRE_CUDA(cudaEventRecord(begin, stream));
      body();
      REQUIRE_CUDA(cudaEventRecord(end, stream));
      REQUIRE_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      REQUIRE_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 3) times.push_back(ms * 1000);
    }
    return median(times);
  };
  // A GPU that idled takes a while to reach its clocks.
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(400)) {
    build(stream);
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
  }
  std::printf("%s: direct %.1f us", name.c_str(), time([&] { build(stream); }));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  build(stream);
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::printf(", graph %.1f us; kernels",
              time([&] { REQUIRE_CUDA(cudaGraphLaunch(executable, stream)); }));
  std::size_t count = 0;
  REQUIRE_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  REQUIRE_CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  // A kernel needs what those before it left: all run in order, with events between them.
  std::vector<std::function<void()>> steps;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    REQUIRE_CUDA(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeKernel) {
      cudaKernelNodeParams kernel;
      REQUIRE_CUDA(cudaGraphKernelNodeGetParams(node, &kernel));
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      REQUIRE_CUDA(cudaGraphKernelNodeGetAttribute(node, cluster.id, &cluster.val));
      steps.push_back([=]() mutable {
        cudaLaunchConfig_t config{
            kernel.gridDim, kernel.blockDim, kernel.sharedMemBytes,
            stream,         &cluster,        cluster.val.clusterDim.x > 1 ? 1U : 0U};
        REQUIRE_CUDA(cudaLaunchKernelExC(&config, kernel.func, kernel.kernelParams));
      });
    } else if (type == cudaGraphNodeTypeMemset) {
      cudaMemsetParams memset;
      REQUIRE_CUDA(cudaGraphMemsetNodeGetParams(node, &memset));
      steps.push_back([=] {
        REQUIRE_CUDA(cudaMemsetAsync(memset.dst, static_cast<int>(memset.value),
                                     memset.width * memset.elementSize, stream));
      });
    }
  }
  std::vector<cudaEvent_t> events(steps.size() + 1);
  for (cudaEvent_t& event : events) REQUIRE_CUDA(cudaEventCreate(&event));
  std::vector<std::vector<double>> times(steps.size());
  for (int i = 0; i < kRuns; ++i) {
    REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
    for (std::size_t k = 0; k < steps.size(); ++k) {
      REQUIRE_CUDA(cudaEventRecord(events[k], stream));
      steps[k]();
    }
    REQUIRE_CUDA(cudaEventRecord(events.back(), stream));
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    for (std::size_t k = 0; k < steps.size(); ++k) {
      float ms = 0;
      REQUIRE_CUDA(cudaEventElapsedTime(&ms, events[k], events[k + 1]));
      times[k].push_back(ms * 1000);
    }
  }
  for (std::size_t k = 0; k < std::min<std::size_t>(steps.size(), 12); ++k) {
    std::printf(" %.1f", median(times[k]));
  }
  std::printf("\n");
  std::fflush(stdout);
  REQUIRE_CUDA(cudaGraphExecDestroy(executable));
  REQUIRE_CUDA(cudaGraphDestroy(graph));
  REQUIRE_CUDA(cudaStreamDestroy(stream));
}

// main() of the index tests: "check", the default, "time" or "all". `failures` is counted by check().
inline int run_index_test(int argc, char** argv, const int& failures, void (*check)(),
                          void (*time)()) {
  const std::string what = argc < 2 ? "check" : argv[1];
  if (argc > 2 || (what != "check" && what != "time" && what != "all")) {
    std::fprintf(stderr, "usage: %s [check|time|all]\n", argv[0]);
    return 2;
  }
  if (what != "time") check();
  std::printf("%d failures\n", failures);
  if (what != "check") time();
  return failures == 0 ? 0 : 1;
}

}  // namespace minference::cuda_test

// cuda_box_costs: what the CUDA executors need for boxes of different kinds, as the ratios that
// src/index/cuda/box_costs.cc holds.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "attention/cuda/check.h"
#include "bench/cuda_inputs.h"
#include "minference/attention.h"
#include "minference/sparse_index.h"

namespace minference::bench {
namespace {

struct Sizes {
  std::int64_t tokens = 65536;
  std::int64_t q_heads = 32;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 128;
};

class Device {
 public:
  explicit Device(const Sizes& sizes)
      : sizes_(sizes),
        inputs_(InputKind::kStructured, sizes.tokens, sizes.q_heads, sizes.kv_heads, sizes.head_dim,
                7) {
    cuda::check(cudaEventCreate(&begin_), "creating an event");
    cuda::check(cudaEventCreate(&end_), "creating an event");
  }
  ~Device() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Milliseconds, the median of 5; all heads alike. Null: exact attention.
  double time(const HeadIndex* head) {
    SparseIndex index{1, sizes_.q_heads, {}, 0.0};
    if (head != nullptr) index.heads.assign(sizes_.q_heads, *head);
    AttentionInput input;
    input.q = inputs_.q;
    input.k = inputs_.k;
    input.v = inputs_.v;
    std::vector<float> times;
    for (int i = 0; i < 6; ++i) {
      cuda::check(cudaEventRecord(begin_), "recording an event");
      attention(input, {}, {inputs_.out, {}}, head == nullptr ? nullptr : &index);
      cuda::check(cudaEventRecord(end_), "recording an event");
      cuda::check(cudaEventSynchronize(end_), "waiting for attention");
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "timing attention");
      if (i > 0) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  Sizes sizes_;
  CudaInputs inputs_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// `count` runs of `boxes` boxes each, from as many rows behind the query as `step` boxes on.
HeadIndex runs_of(std::int64_t count, std::int64_t boxes, std::int64_t step) {
  HeadIndex head;
  head.kind = HeadIndex::Kind::kDiagonal;
  head.rounding = RunRounding::kBox;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = i * step * kRunBox;
    head.runs.push_back({begin, begin + (boxes - 1) * kRunBox + 1, 1});
  }
  return head;
}

// Boxes that the tiles of 128 rows of one head load, and runs that they walk.
struct Load {
  double boxes = 0;
  double runs = 0;
};
Load load_of(const HeadIndex& head, std::int64_t tokens) {
  Load load;
  for (std::int64_t row = 0; row < tokens; row += 128) {
    for (const OffsetRun& run : head.runs) {
      const std::int64_t high = row + 128 - run.begin;
      const std::int64_t low = row + 64 - run.begin - (run.end - run.begin + 63) / 64 * 64;
      if (high <= 0) continue;
      const std::int64_t boxes = (high - std::max<std::int64_t>(low, 0) + 63) / 64;
      load.boxes += static_cast<double>(boxes);
      load.runs += 1;
    }
  }
  return load;
}

void print(const Sizes& sizes) {
  Device device(sizes);
  const double heads = static_cast<double>(sizes.q_heads);
  const double tiles = static_cast<double>(sizes.tokens) / 128;
  const std::int64_t key_boxes = sizes.tokens / kRunBox;
  const auto n = static_cast<double>(key_boxes);
  const double dense = device.time(nullptr) / heads / (n * (n + 2) / 4) * 1e6;
  const HeadIndex nearest = runs_of(1, 1, 1);
  const HeadIndex band = runs_of(1, 256, 1);
  const double near_ms = device.time(&nearest) / heads;
  const double band_ms = device.time(&band) / heads;
  const Load near_load = load_of(nearest, sizes.tokens);
  const Load band_load = load_of(band, sizes.tokens);
  const double box = (band_ms - near_ms) / (band_load.boxes - near_load.boxes) * 1e6;
  const double tile = (near_ms * 1e6 - box * near_load.boxes) / tiles;
  std::printf("a box of a band %.1f ns, so that exact attention takes %.3f of it, a tile %.2f\n",
              box, dense / box, tile / box);
  for (const std::int64_t boxes : {1, 2, 4, 8}) {
    const HeadIndex runs = runs_of(32, boxes, 16);
    const Load load = load_of(runs, sizes.tokens);
    const double ms = device.time(&runs) / heads;
    std::printf("a run of %lld boxes, beside them: %.3f\n", static_cast<long long>(boxes),
                (ms * 1e6 - box * load.boxes - tile * tiles) / load.runs / box);
  }
  for (const std::int64_t count : {1024, 3072}) {
    HeadIndex columns = nearest;
    double boxes = 0;
    for (std::int64_t i = 0; i < count; ++i) columns.columns.push_back(i * (sizes.tokens / count));
    for (std::int64_t row = 0; row < sizes.tokens; row += 128) {
      const std::int64_t seen = (row + 127) / (sizes.tokens / count) + 1;
      const std::int64_t of_tile = (seen + 63) / 64;
      boxes += static_cast<double>(of_tile);
    }
    std::printf("a box of %lld columns: %.3f\n", static_cast<long long>(count),
                (device.time(&columns) / heads - near_ms) * 1e6 / boxes / box);
  }
}

}  // namespace
}  // namespace minference::bench

int main(int argc, char** argv) {
  minference::bench::Sizes sizes;
  CLI::App app{
      "Measures what CUDA executors need for boxes of 64 keys: in bands, short runs and gathered\n"
      "columns, in units of a box of a band. The ratios stand in src/index/cuda/box_costs.cc."};
  app.footer("Examples:\n  cuda_box_costs\n  MINFERENCE_FORCE_CUDA=sm80 cuda_box_costs -p 32768");
  app.add_option("-p,--tokens", sizes.tokens, "Prompt length, a multiple of 4096")
      ->check(CLI::Range(std::int64_t{32768}, std::int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--head-dim", sizes.head_dim, "Head dim, even")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{256}))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    minference::bench::print(sizes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_box_costs: error: %s\n", error.what());
    return 1;
  }
}

// cuda_bench: times attention on a CUDA device, index and kernel, for methods and lengths; checks the
// results against the CPU first.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "attention/cuda/check.h"
#include "bench/cuda_inputs.h"
#include "bench/report.h"
#include "minference/cuda.h"
#include "minference/error.h"
#include "minference/method.h"

namespace minference::bench {
namespace {

struct Bench {
  std::vector<std::int64_t> tokens = {8192, 32768, 131072};
  std::vector<std::string> methods = {"dense", "head_mix"};
  std::int64_t q_heads = 32;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 128;
  int repetitions = 5;
  InputKind inputs = InputKind::kStructured;
  bool guard = false;
  bool host_time = false;
  MethodOptions options;
  std::string json_path;
};

// The budgets of a published configuration for a Llama-3 8B model with a context of 1M tokens, in its
// proportions: the yardstick of docs/performance.md.
PatternFile head_mix(std::int64_t heads) {
  struct Share {
    int of_32;
    std::int64_t vertical;
    std::int64_t slash;
  };
  constexpr Share kShares[] = {
      {15, 1000, 6096}, {9, 30, 800}, {5, 100, 800}, {2, 3500, 100}, {1, 500, 700}};
  std::vector<HeadPattern> deck;
  for (const Share& share : kShares) {
    for (int i = 0; i < share.of_32; ++i) {
      HeadPattern pattern;
      pattern.vertical = share.vertical;
      pattern.slash = share.slash;
      deck.push_back(pattern);
    }
  }
  PatternFile file(1);
  // A step without common factor with 32 spreads each kind over the KV heads.
  for (std::int64_t h = 0; h < heads; ++h) file.set(0, h, deck[h * 13 % 32]);
  return file;
}

// A prompt that is a video of frames of 256 tokens, but for a sixteenth of text on either side.
struct Video {
  explicit Video(std::int64_t tokens)
      : segment{tokens / 16, tokens - tokens / 16, Modality::kVisual,
                std::min<std::int64_t>(256, tokens - tokens / 16 * 2)},
        sequence(&segment, 1),
        segments(&sequence, 1) {}
  Video(const Video&) = delete;
  Video& operator=(const Video&) = delete;

  Segment segment;
  std::span<const Segment> sequence;
  std::span<const std::span<const Segment>> segments;
};

class Runner {
 public:
  Runner(const Bench& bench, const std::string& name) : patterns_(head_mix(bench.q_heads)) {
    method_ = &find_method(name == "head_mix" ? "minference"
                           : name == "video"  ? "mminference"
                                              : name);
    if (name == "head_mix") context_.patterns = &patterns_;
    has_video_ = name == "video";
    for (const MethodOption& option : method_->options()) {
      const auto given = bench.options.find(option.name);
      if (given != bench.options.end()) options_.insert(*given);
    }
  }

  Stats run(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
            bool measure, const GuardOptions& guard = {}, const TensorView& lse = {}) const {
    AttentionInput input;
    input.q = q;
    input.k = k;
    input.v = v;
    AttentionParams params;
    params.measure = measure;
    const Video video(k.tokens());
    MethodContext context = context_;
    context.guard = guard;
    if (has_video_) context.segments = video.segments;
    return attention(input, params, {out, lse}, *method_, options_, context);
  }

  // The same on the CPU, with runs rounded as the device rounds them.
  void run_on_cpu(const TensorView& q, const TensorView& k, const TensorView& v,
                  const TensorView& out) const {
    AttentionInput input;
    input.q = q;
    input.k = k;
    input.v = v;
    // auto has other offers there; prompts this short it takes exactly on a device.
    const Method& method = method_->name() == std::string("auto") ? find_method("dense") : *method_;
    const Video video(k.tokens());
    MethodContext context = context_;
    if (has_video_) context.segments = video.segments;
    SparseIndex index = method.build_index(
        input, {}, resolve_options(method, &method == method_ ? options_ : MethodOptions()),
        context);
    for (HeadIndex& head : index.heads) {
      if (head.rounding == RunRounding::kGranule) head.rounding = RunRounding::kBox;
    }
    attention(input, {}, {out, {}}, &index);
  }

 private:
  PatternFile patterns_;
  const Method* method_;
  MethodOptions options_;
  MethodContext context_;
  bool has_video_ = false;
};

// Rows [row, row + 1) or [0, row + 1) of a tensor.
TensorView rows_of(TensorView view, std::int64_t first, std::int64_t count) {
  view.data = static_cast<char*>(view.data) + first * view.strides[1] * dtype_size(view.dtype);
  view.shape[1] = count;
  return view;
}

// Share of the attention mass that the method keeps, sinks included, in the mean of some rows and all
// heads: what the sum of a row's exponentials has lost.
double recall(const Runner& runner, const CudaInputs& inputs) {
  constexpr std::int64_t kRows = 32;
  const std::int64_t tokens = inputs.q.tokens();
  const std::int64_t heads = inputs.q.heads();
  const Device device = inputs.q.device;
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, static_cast<std::size_t>((tokens + 1) * heads) * sizeof(float)),
              "allocating the sums of rows");
  const TensorView sparse =
      TensorView::contiguous(memory, DType::kF32, {1, tokens, heads, 1}, device);
  const TensorView exact = TensorView::contiguous(static_cast<float*>(memory) + tokens * heads,
                                                  DType::kF32, {1, 1, heads, 1}, device);
  runner.run(inputs.q, inputs.k, inputs.v, inputs.out, false, {}, sparse);
  double sum = 0;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const std::int64_t row = std::min(tokens * (2 * i + 1) / (2 * kRows) + i * 37 % 64, tokens - 1);
    AttentionInput input;
    input.q = rows_of(inputs.q, row, 1);
    input.k = rows_of(inputs.k, 0, row + 1);
    input.v = rows_of(inputs.v, 0, row + 1);
    attention(input, {}, {rows_of(inputs.out, row, 1), exact});
    std::vector<float> kept(heads);
    std::vector<float> all(heads);
    const auto read = [&](std::vector<float>& to, const TensorView& from) {
      cuda::check(cudaMemcpy(to.data(), from.data, heads * sizeof(float), cudaMemcpyDeviceToHost),
                  "copying to the host");
    };
    read(kept, rows_of(sparse, row, 1));
    read(all, exact);
    for (std::int64_t h = 0; h < heads; ++h) sum += std::exp(kept[h] - all[h]);
  }
  cudaFree(memory);
  return sum / static_cast<double>(kRows * heads);
}

// Root mean square of the difference from the CPU's result, over its own.
double error_against_cpu(const Bench& bench, const std::string& name) {
  constexpr std::int64_t kTokens = 8192;
  const CudaInputs inputs(bench.inputs, kTokens, bench.q_heads, bench.kv_heads, bench.head_dim, 7);
  const Runner runner(bench, name);
  runner.run(inputs.q, inputs.k, inputs.v, inputs.out, false);
  std::vector<std::vector<std::uint16_t>> memory;
  const auto on_host = [&](const TensorView& view) {
    std::int64_t count = 1;
    for (const std::int64_t extent : view.shape) count *= extent;
    memory.emplace_back(count);
    cuda::check(cudaMemcpy(memory.back().data(), view.data, count * 2, cudaMemcpyDeviceToHost),
                "copying to the host");
    return TensorView::contiguous(memory.back().data(), view.dtype, view.shape);
  };
  memory.reserve(5);
  const TensorView q = on_host(inputs.q);
  const TensorView k = on_host(inputs.k);
  const TensorView v = on_host(inputs.v);
  const TensorView device = on_host(inputs.out);
  const TensorView host = on_host(inputs.out);
  runner.run_on_cpu(q, k, v, host);
  const auto value = [](const TensorView& view, std::size_t i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<std::uint16_t*>(view.data)[i])
                               << 16;
    float number = 0;
    std::memcpy(&number, &bits, sizeof(number));
    return static_cast<double>(number);
  };
  double differences = 0;
  double squares = 0;
  const std::size_t count = memory.back().size();
  for (std::size_t i = 0; i < count; ++i) {
    const double difference = value(device, i) - value(host, i);
    differences += difference * difference;
    squares += value(host, i) * value(host, i);
  }
  return std::sqrt(differences / squares);
}

// Milliseconds of the device for each repetition, sorted.
template <class Call>
std::vector<double> device_times(const Bench& bench, const Call& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin), "creating an event");
  cuda::check(cudaEventCreate(&end), "creating an event");
  std::vector<double> times;
  for (int i = 0; i < bench.repetitions; ++i) {
    float milliseconds = 0;
    cuda::check(cudaEventRecord(begin), "recording an event");
    call();
    cuda::check(cudaEventRecord(end), "recording an event");
    cuda::check(cudaEventSynchronize(end), "waiting for attention");
    cuda::check(cudaEventElapsedTime(&milliseconds, begin, end), "timing attention");
    times.push_back(milliseconds);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times;
}

nlohmann::json measure(const Bench& bench, const std::string& name, std::int64_t tokens) {
  const CudaInputs inputs(bench.inputs, tokens, bench.q_heads, bench.kv_heads, bench.head_dim, 7);
  const Runner runner(bench, name);
  const auto run = [&](bool measured, const GuardOptions& guard = {}) {
    return runner.run(inputs.q, inputs.k, inputs.v, inputs.out, measured, guard);
  };
  run(false);
  const Stats stats = run(true);
  const std::vector<double> times = device_times(bench, [&] { run(false); });
  const double median = times[times.size() / 2];
  const double flops = 4.0 * static_cast<double>(bench.head_dim * stats.kept_pairs);
  nlohmann::json row = {{"method", name},
                        {"tokens", tokens},
                        {"q_heads", bench.q_heads},
                        {"kv_heads", bench.kv_heads},
                        {"head_dim", bench.head_dim},
                        {"kept", stats.kept_fraction()},
                        {"recall", stats.kept_fraction() < 1 ? recall(runner, inputs) : 1.0},
                        {"index_ms", stats.index_seconds * 1e3},
                        {"kernel_ms", stats.kernel_seconds * 1e3},
                        {"total_ms", median},
                        {"total_min_ms", times.front()},
                        {"total_max_ms", times.back()},
                        {"kernel_tflops", flops / stats.kernel_seconds * 1e-12},
                        {"total_tflops", flops / median * 1e-9}};
  if (!bench.guard) return row;
  // One that lets every head pass: nothing but the guard's own work is added.
  const GuardOptions guard{.mode = GuardMode::kEnforce, .min_recall = 0};
  const std::vector<double> guarded = device_times(bench, [&] { run(false, guard); });
  row["guard_ms"] = guarded[guarded.size() / 2] - median;
  return row;
}

// Microseconds of the host until a call returns.
nlohmann::json measure_host(const Bench& bench, const std::string& name, std::int64_t tokens) {
  const CudaInputs inputs(bench.inputs, tokens, bench.q_heads, bench.kv_heads, bench.head_dim, 7);
  const Runner runner(bench, name);
  const GuardOptions guard{.mode = bench.guard ? GuardMode::kEnforce : GuardMode::kOff,
                           .min_recall = 0};
  constexpr int kCalls = 10;  // in a row, as the layers of a model follow each other
  std::vector<double> times;
  for (int i = 0; i <= bench.repetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; ++call) {
      runner.run(inputs.q, inputs.k, inputs.v, inputs.out, false, guard);
    }
    const std::chrono::duration<double, std::micro> spent =
        std::chrono::steady_clock::now() - begin;
    cuda::check(cudaDeviceSynchronize(), "waiting for attention");
    if (i > 0) times.push_back(spent.count() / kCalls);  // the first is a warm-up
  }
  std::sort(times.begin(), times.end());
  return {{"method", name},
          {"tokens", tokens},
          {"host_us", times[times.size() / 2]},
          {"host_min_us", times.front()},
          {"host_max_us", times.back()}};
}

void print_row(const nlohmann::json& row) {
  std::printf("%-16s %9lld %6.2f%% %7.4f %9.3f %10.3f %10.3f %10.3f..%9.3f %9.0f",
              row["method"].get<std::string>().c_str(), row["tokens"].get<long long>(),
              row["kept"].get<double>() * 100, row["recall"].get<double>(),
              row["index_ms"].get<double>(), row["kernel_ms"].get<double>(),
              row["total_ms"].get<double>(), row["total_min_ms"].get<double>(),
              row["total_max_ms"].get<double>(), row["total_tflops"].get<double>());
  if (row.contains("guard_ms")) std::printf(" %9.4f", row["guard_ms"].get<double>());
  std::printf("\n");
}

void print_host_row(const nlohmann::json& row) {
  std::printf("%-16s %9lld %10.1f %10.1f..%9.1f\n", row["method"].get<std::string>().c_str(),
              row["tokens"].get<long long>(), row["host_us"].get<double>(),
              row["host_min_us"].get<double>(), row["host_max_us"].get<double>());
}

int run(const Bench& bench) {
  const CudaDevice device = cuda_devices().front();
  std::printf("%s, kernels %s; bf16, %lld/%lld heads of %lld, batch 1, causal\n",
              device.name.c_str(), device.kernels.c_str(), static_cast<long long>(bench.q_heads),
              static_cast<long long>(bench.kv_heads), static_cast<long long>(bench.head_dim));
  for (const std::string& name : bench.methods) {
    const double error = error_against_cpu(bench, name);
    std::printf("%-16s against the CPU at 8192 tokens: relative error %.1e\n", name.c_str(), error);
    if (!(error < 2e-2)) {
      std::fprintf(stderr, "cuda_bench: error: %s is wrong\n", name.c_str());
      return 1;
    }
  }
  if (bench.host_time) {
    std::printf("%-16s %9s %10s %21s\n", "method", "tokens", "host us", "min .. max");
  } else {
    std::printf("%-16s %9s %7s %7s %9s %10s %10s %21s %9s%s\n", "method", "tokens", "kept",
                "recall", "index ms", "kernel ms", "total ms", "min .. max", "TFLOP/s",
                bench.guard ? "  guard ms" : "");
  }
  nlohmann::json rows = nlohmann::json::array();
  for (const std::int64_t tokens : bench.tokens) {
    for (const std::string& name : bench.methods) {
      const nlohmann::json row =
          bench.host_time ? measure_host(bench, name, tokens) : measure(bench, name, tokens);
      if (bench.host_time) {
        print_host_row(row);
      } else {
        print_row(row);
      }
      std::fflush(stdout);
      rows.push_back(row);
    }
  }
  if (!bench.json_path.empty()) {
    std::ofstream file(bench.json_path);
    file << nlohmann::json{{"device", device.name}, {"results", rows}}.dump(2) << '\n';
    if (!file) throw IoError("cannot write " + bench.json_path);
  }
  return 0;
}

}  // namespace
}  // namespace minference::bench

int main(int argc, char** argv) {
  using minference::bench::InputKind;
  minference::bench::Bench bench;
  CLI::App app{"Times attention on a CUDA device; results are checked against the CPU first."};
  app.footer(
      "Methods that run on CUDA: docs/cuda.md. The peer's figures: bench/peers/cuda_sdpa.py; a "
      "picture of\n"
      "both: bench/cuda_plot.py.\n"
      "Examples:\n"
      "  cuda_bench\n"
      "  cuda_bench -p 32768,131072 -m dense,vertical_slash,block_sparse --json figures.json\n"
      "  cuda_bench -p 1048576 -m head_mix -r 1\n"
      "  cuda_bench -p 8192,131072 -m head_mix --guard\n"
      "  cuda_bench -p 1024 -m dense,head_mix,block_sparse --host-time -r 50\n"
      "  cuda_bench -p 131072 -m auto -o coverage=0.9\n"
      "  cuda_bench -p 32768 -m dense,auto --inputs random\n"
      "  MINFERENCE_FORCE_CUDA=sm80 cuda_bench -p 32768 -m dense");
  app.add_option("-p,--tokens", bench.tokens, "Prompt lengths, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  app.add_option("-m,--method", bench.methods,
                 "Methods, separated by commas; head_mix is minference with a published mix of\n"
                 "per-head budgets, video mminference on a prompt that is mostly one")
      ->delimiter(',')
      ->capture_default_str();
  const CLI::Range heads(std::int64_t{1}, std::int64_t{65536});
  app.add_option("--heads", bench.q_heads, "Query heads, a multiple of the KV heads")
      ->check(heads)
      ->capture_default_str();
  app.add_option("--kv-heads", bench.kv_heads, "KV heads")->check(heads)->capture_default_str();
  app.add_option("--head-dim", bench.head_dim, "Head dim, even")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{256}))
      ->capture_default_str();
  std::vector<std::string> options;
  app.add_option("-o,--attn-opt", options,
                 "key=value for the methods that have such an option, for example coverage=0.9");
  app.add_option("-r,--repetitions", bench.repetitions,
                 "Timed runs after a warm-up: the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option(
         "--inputs", bench.inputs,
         "structured: attention as a long prompt's; random: nearly even, nothing to leave out")
      ->transform(CLI::CheckedTransformer(std::map<std::string, InputKind>{
          {"structured", InputKind::kStructured}, {"random", InputKind::kRandom}}))
      ->default_str("structured");
  app.add_flag("--guard", bench.guard,
               "Also time the guard, on its default rows, and show the recall");
  app.add_flag("--host-time", bench.host_time,
               "Instead: microseconds until a call returns, ten calls in a row");
  app.add_option("--json", bench.json_path, "Also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    if (!bench.json_path.empty()) minference::bench::check_writable(bench.json_path);
    for (const std::string& option : options) minference::parse_option(option, bench.options);
    return minference::bench::run(bench);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cuda_bench: error: %s\n", error.what());
    return 1;
  }
}

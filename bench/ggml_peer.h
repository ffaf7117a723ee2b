// ggml's own CPU operations, as the peers that the benchmarks measure in the same run.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace minference::bench {

// Version of the ggml that runs.
std::string ggml_library_version();

// One causal self-attention call of `tokens` tokens, prepared once and run many times.
class GgmlAttention {
 public:
  // q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], packed f32; K and V are
  // stored as f16, as llama.cpp's cache does. Throws std::runtime_error when ggml cannot run it.
  GgmlAttention(const std::vector<float>& q, const std::vector<float>& k,
                const std::vector<float>& v, std::int64_t tokens, std::int64_t q_heads,
                std::int64_t kv_heads, std::int64_t head_dim, int threads);
  ~GgmlAttention();

  void run();
  // [tokens, q_heads, head_dim] of the last run.
  const float* output() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// One matrix product weight [rows, cols] x activations [tokens, cols], prepared once and run many
// times.
class GgmlMatMul {
 public:
  // Quantises `weight` to `type`. repack: let the CPU backend reorder the weight as llama.cpp does,
  // where it has a form for this type.
  GgmlMatMul(ggml_type type, const std::vector<float>& weight,
             const std::vector<float>& activations, std::int64_t rows, std::int64_t cols,
             std::int64_t tokens, int threads, bool repack);
  ~GgmlMatMul();

  void run();
  // [tokens, rows] of the last run.
  const float* output() const;
  // The weight in plain layout; null after repacking.
  const ggml_tensor* weight() const;
  bool repacked() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace minference::bench

// attention(): exact or sparse causal attention over strided, ragged, grouped-query tensors.
//
// The causal alignment is bottom-right everywhere in this project: query row i of a sequence stands
// at position kv_len - q_len + i and sees the keys at positions <= its own. A first prefill, a later
// chunk, a turn after prefix reuse and a decode step are therefore the same call.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "minference/isa.h"
#include "minference/sparse_index.h"
#include "minference/tensor.h"

namespace minference {

// Visibility given explicitly, one bit per (sequence, query row, key): key j of row i is bit j % 64
// of words[sequence * sequence_stride + i * row_stride + j / 64]. It replaces the causal rule; a
// sliding window and an index still apply on top. Bits at and beyond kv_len are ignored.
struct VisibilityMask {
  const std::uint64_t* words = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t sequence_stride = 0;

  bool empty() const { return words == nullptr; }
};

// What attention reads. q, k, v and the output lie on one device, and with them the words of a mask;
// lengths, block tables and sinks are always the host's. Nothing is copied or kept; keys at and
// beyond kv_len are never read. A NaN or infinity in a query reaches the output of its own row only,
// one in a key or value only rows that see the key; the 64 rows of a row block with such a result are
// computed twice. A visible score of +inf makes its row NaN, one of -inf has weight 0.
struct AttentionInput {
  TensorView q;  // [batch, q_tokens, q_heads, head_dim], f32, f16 or bf16
  // [batch, kv_tokens, kv_heads, head_dim] and [batch, kv_tokens, kv_heads, v_head_dim], or, with a
  // block table, [pages, page_size, kv_heads, ...]. q_heads must be a multiple of kv_heads: query
  // head h reads KV head h / (q_heads / kv_heads).
  TensorView k;
  TensorView v;
  // Lengths of each sequence, [batch] entries or empty (every sequence has q_tokens, kv_tokens).
  // Output rows at and beyond a sequence's q_len are not written.
  std::span<const std::int64_t> q_lens;
  std::span<const std::int64_t> kv_lens;
  // Paged K/V: [batch, pages_per_sequence] page numbers, row-major; token t of sequence b lies in
  // page block_table[b * pages_per_sequence + t / page_size]. kv_lens is required with it.
  std::span<const std::int32_t> block_table;
  std::int64_t pages_per_sequence = 0;
  // One logit per query head that takes part in the softmax without a value (gpt-oss), or empty.
  std::span<const float> sinks;
  VisibilityMask mask;
};

// How exactly products are computed.
enum class Precision : std::uint8_t {
  kAuto,  // bf16 products where q, k or v is a 16-bit type, f32 products otherwise
  kF32,   // f32 products always; on a CUDA device for f32 tensors only
  kBF16,  // bf16 products where the machine has them, whatever the input types; CUDA: as kAuto
};

struct AttentionParams {
  float scale = 0.0F;     // factor on q.k; 0 means 1 / sqrt(head_dim)
  float soft_cap = 0.0F;  // c > 0: scores become c * tanh(score / c)
  // w > 0: a row sees no key that lies w or more positions behind its own; 0: no window.
  std::int64_t sliding_window = 0;
  bool causal = true;  // false: rows also see the keys after their own position
  Precision precision = Precision::kAuto;
  int threads = 0;  // 0: the OpenMP default
  // Tensors on a CUDA device: the cudaStream_t to work in, of that device; null: its default stream.
  void* stream = nullptr;
  // Tensors on a CUDA device: wait for the work and measure it. Otherwise the call returns at once,
  // and the pairs and seconds of Stats are 0.
  bool measure = false;
};

struct AttentionOutput {
  TensorView out;  // [batch, q_tokens, q_heads, v_head_dim], f32, f16 or bf16; required
  // Natural-log sum of exponentials of the scaled scores (sinks included),
  // [batch, q_tokens, q_heads, 1] f32; optional. Rows that see no key, or only scores of -inf, get
  // output 0 and LSE -inf (the sink's logit where the head has a sink).
  TensorView lse;
};

// What a call did.
struct Stats {
  std::string method;  // name of the method; "dense" without index, "sparse" for a bare one
  IsaLevel isa = IsaLevel::kGeneric;  // of the CPU's kernels
  int cuda_kernels = 0;  // 90 or 80 (sm_90a, sm_80) where a CUDA device's kernels took the call
  std::int64_t kept_pairs = 0;    // (row, key) pairs computed, over all query heads
  std::int64_t causal_pairs = 0;  // pairs that dense attention under the same mask computes
  double index_seconds = 0.0;
  double kernel_seconds = 0.0;
  double guard_seconds = 0.0;
  // Sum and number of the recalls that the guard measured, one a head and call.
  double recall_sum = 0.0;
  std::int64_t recall_count = 0;
  // Reason -> how often: calls, or heads where the reason speaks of heads.
  std::map<std::string, std::int64_t> fallbacks;

  // Kept share of the causal area, 1 when there is none.
  double kept_fraction() const {
    return causal_pairs > 0 ? static_cast<double>(kept_pairs) / static_cast<double>(causal_pairs)
                            : 1.0;
  }
  // Mean of the recalls; 1 when none was measured.
  double mass_recall() const {
    return recall_count > 0 ? recall_sum / static_cast<double>(recall_count) : 1.0;
  }
  // Name of the level of the kernels, or "sm_90a" or "sm_80".
  const char* kernels() const;
  // Sums figures and fallbacks; different methods are joined as "a+b", of the levels the lower stays.
  void add(const Stats& other);
};

// Computes softmax(scale * q k^T + visibility) v into `output`, where the tensors lie; for a CUDA
// device see minference/cuda.h. Without `index`, exactly; with it,
// over the index's keys only. Throws InvalidArgument for a shape, stride, dtype, length or index
// that breaks the contract above, and nothing else that the caller could prevent.
// Thread-safe: calls share nothing, and a forked child may call too. Source of the sparse forms:
// MInference (arXiv 2407.02490) §3.
Stats attention(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const SparseIndex* index = nullptr);

// Throws InvalidArgument unless the three describe a legal call; attention() calls it itself.
void validate(const AttentionInput& input, const AttentionParams& params,
              const AttentionOutput& output);

}  // namespace minference

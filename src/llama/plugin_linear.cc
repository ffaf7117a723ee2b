#include "llama/plugin_linear.h"

#include <string_view>

#include "llama/ggml_weight.h"
#include "minference/linear.h"

namespace minference::llama_host {
namespace {

bool is_matrix(const ggml_tensor* t) { return t->ne[2] == 1 && t->ne[3] == 1; }

// Weights that are not used for whole prompts: llama.cpp computes logits for the last token only, and
// a tied output matrix would be loaded twice if it lay in another buffer than the embeddings.
bool is_output(const ggml_tensor* weight) {
  const std::string_view name(weight->name);
  return name.starts_with("output") || name.starts_with("token_embd");
}

bool is_k_quant(ggml_type type) {
  return type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K;
}

}  // namespace

std::int64_t linear_min_rows(ggml_type type, IsaLevel level) {
  constexpr std::int64_t kAlways = 64;
  if (!weight_format(type)) return 0;
  if (level == IsaLevel::kAmxBf16) return kAlways;
  // ggml multiplies k-quants in 8-bit integers, which beats bf16 pairs and f32.
  if (is_k_quant(type)) return 0;
  if (level == IsaLevel::kAvx512Bf16) return kAlways;
  // In f32 only these were measured to win.
  const bool wins_in_f32 = type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_0 ||
                           type == GGML_TYPE_Q5_1 || type == GGML_TYPE_Q8_0;
  return level == IsaLevel::kAvx512 && wins_in_f32 ? kAlways : 0;
}

bool prefers_plain_layout(ggml_type type, IsaLevel level) {
  // ggml's tiles for k-quants were measured with AVX-512 only.
  const bool avx512 =
      level == IsaLevel::kAvx512 || level == IsaLevel::kAvx512Bf16 || level == IsaLevel::kAmxBf16;
  return linear_min_rows(type, level) > 0 || (is_k_quant(type) && avx512);
}

bool takes_linear(const ggml_tensor* op, IsaLevel level, ggml_backend_buffer_type_t own_type) {
  if (op->op != GGML_OP_MUL_MAT) return false;
  const ggml_tensor* weight = op->src[0];
  const ggml_tensor* activations = op->src[1];
  // Only weights: products of attention without flash attention have computed operands.
  if (weight->buffer == nullptr || weight->op != GGML_OP_NONE || is_output(weight)) return false;
  if (weight->buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
    // llama.cpp asks where to put a weight that it is about to load.
    return weight->buffer->buft == own_type && is_matrix(weight) &&
           prefers_plain_layout(weight->type, level);
  }
  const std::int64_t min_rows = linear_min_rows(weight->type, level);
  return min_rows > 0 && activations->ne[1] >= min_rows && is_matrix(weight) &&
         is_matrix(activations) && op->type == GGML_TYPE_F32 &&
         activations->type == GGML_TYPE_F32 && activations->nb[0] == sizeof(float) &&
         activations->nb[1] % sizeof(float) == 0 && op->nb[0] == sizeof(float) &&
         op->nb[1] % sizeof(float) == 0 &&
         weight->ne[0] % block_elements(*weight_format(weight->type)) == 0;
}

void compute_linear(ggml_tensor* op, IsaLevel level, int threads) {
  const ggml_tensor* activations = op->src[1];
  const GgmlWeight weight(op->src[0], *weight_format(op->src[0]->type), level);
  linear_cpu(static_cast<const float*>(activations->data),
             static_cast<std::int64_t>(activations->nb[1] / sizeof(float)), activations->ne[1],
             weight.linear_weight(), static_cast<float*>(op->data),
             static_cast<std::int64_t>(op->nb[1] / sizeof(float)), level, threads);
}

}  // namespace minference::llama_host

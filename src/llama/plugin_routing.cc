#include "llama/plugin_routing.h"

#include <charconv>
#include <cstring>
#include <string_view>

namespace minference::llama_host {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;

// Bytes of an element of the types that attention() reads, 0 for others.
std::size_t element_size(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return 4;
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
      return 2;
    default:
      return 0;
  }
}

// Rows are contiguous and every stride is a whole number of elements.
bool regular_strides(const ggml_tensor* t) {
  const std::size_t size = element_size(t->type);
  return size != 0 && t->nb[0] == size && t->nb[1] % size == 0 && t->nb[2] % size == 0 &&
         t->nb[3] % size == 0;
}

const char* decline_mask(const ggml_tensor* op) {
  const ggml_tensor* q = op->src[0];
  const ggml_tensor* mask = op->src[3];
  if (mask == nullptr) return nullptr;
  if (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->nb[1] % 2 != 0) {
    return "the mask is not f16";
  }
  if (mask->ne[0] < op->src[1]->ne[1] || mask->ne[1] < q->ne[1]) {
    return "the mask is smaller than the scores";
  }
  if (mask->ne[2] != 1) return "the mask differs between heads";
  if (mask->ne[3] != 1 && mask->ne[3] != q->ne[3]) return "the mask is shared by some streams only";
  return nullptr;
}

const char* decline_reason(const ggml_tensor* op) {
  const ggml_tensor* q = op->src[0];
  const ggml_tensor* k = op->src[1];
  const ggml_tensor* v = op->src[2];
  if (q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32) return "Q or the output is not f32";
  if (element_size(k->type) == 0 || element_size(v->type) == 0) {
    return "K or V is quantised";
  }
  if (flash_attention_params(op).max_bias != 0.0F) return "ALiBi";
  if (q->ne[0] > kMaxHeadDim || v->ne[0] > kMaxHeadDim) return "a head dimension above 256";
  if (k->ne[0] != q->ne[0] || k->ne[2] != v->ne[2] || k->ne[1] != v->ne[1] ||
      q->ne[2] % k->ne[2] != 0 || k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) {
    return "unusual shapes of Q, K and V";
  }
  if (!regular_strides(q) || !regular_strides(k) || !regular_strides(v) || !regular_strides(op)) {
    return "unusual strides of Q, K or V";
  }
  // A bound on the visible keys of a row: the model's own sparse attention.
  std::int32_t max_visible = 0;
  std::memcpy(&max_visible, op->op_params + 4, sizeof(max_visible));
  if (max_visible != 0) return "the model selects its own keys";
  const ggml_tensor* sinks = op->src[4];
  if (sinks != nullptr &&
      (sinks->type != GGML_TYPE_F32 || sinks->ne[0] != q->ne[2] || sinks->nb[0] != sizeof(float))) {
    return "unusual sinks";
  }
  return decline_mask(op);
}

}  // namespace

FlashAttentionParams flash_attention_params(const ggml_tensor* op) {
  FlashAttentionParams params;
  std::memcpy(&params, op->op_params, sizeof(params));
  return params;
}

RouteDecision route_operation(const ggml_tensor* op, const PluginConfig& config) {
  if (op->op != GGML_OP_FLASH_ATTN_EXT || config.stock() || op->src[0]->ne[1] < config.min_rows ||
      op->src[1]->ne[1] < config.min_kv) {
    return {Route::kOther, nullptr};
  }
  const char* reason = decline_reason(op);
  return {reason == nullptr ? Route::kTaken : Route::kDeclined, reason};
}

std::int64_t cache_layer(const ggml_tensor* k) {
  while (k->view_src != nullptr) k = k->view_src;
  // "cache_k_l<N>", or with a tag of the cache before the k.
  const std::string_view name(k->name);
  constexpr std::string_view kPrefix = "cache_";
  constexpr std::string_view kInfix = "k_l";
  const std::size_t infix = name.rfind(kInfix);
  if (!name.starts_with(kPrefix) || infix == std::string_view::npos) return -1;
  const char* begin = name.data() + infix + kInfix.size();
  const char* end = name.data() + name.size();
  std::int64_t layer = -1;
  const auto [stop, error] = std::from_chars(begin, end, layer);
  return error == std::errc() && stop == end ? layer : -1;
}

}  // namespace minference::llama_host

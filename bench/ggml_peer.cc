#include "ggml_peer.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace minference::bench {
namespace {

// Sets the threads of a backend that may be a loaded module.
void set_threads(ggml_backend_t backend, int threads) {
  ggml_backend_reg_t registry =
      ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
  if (set != nullptr) set(backend, threads);
}

}  // namespace

struct GgmlAttention::Impl {
  ggml_backend_t backend = nullptr;
  ggml_context* context = nullptr;
  ggml_backend_buffer_t buffer = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* result = nullptr;

  ~Impl() {
    if (buffer != nullptr) ggml_backend_buffer_free(buffer);
    if (context != nullptr) ggml_free(context);
    if (backend != nullptr) ggml_backend_free(backend);
  }
};

GgmlAttention::GgmlAttention(const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v, std::int64_t tokens,
                             std::int64_t q_heads, std::int64_t kv_heads, std::int64_t head_dim,
                             int threads)
    : impl_(std::make_unique<Impl>()) {
  ggml_backend_load_all();
  impl_->backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (impl_->backend == nullptr) throw std::runtime_error("ggml has no CPU backend here");
  set_threads(impl_->backend, threads);

  impl_->context = ggml_init({ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true});
  ggml_context* context = impl_->context;
  // The order of memory is [tokens][heads][dim], as in llama.cpp's cache; the op wants heads last.
  ggml_tensor* q_rows = ggml_new_tensor_3d(context, GGML_TYPE_F32, head_dim, q_heads, tokens);
  ggml_tensor* k_rows = ggml_new_tensor_3d(context, GGML_TYPE_F16, head_dim, kv_heads, tokens);
  ggml_tensor* v_rows = ggml_new_tensor_3d(context, GGML_TYPE_F16, head_dim, kv_heads, tokens);
  ggml_tensor* mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, tokens, tokens);
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  impl_->result = ggml_flash_attn_ext(
      context, ggml_permute(context, q_rows, 0, 2, 1, 3), ggml_permute(context, k_rows, 0, 2, 1, 3),
      ggml_permute(context, v_rows, 0, 2, 1, 3), mask, scale, 0.0F, 0.0F);
  impl_->graph = ggml_new_graph(context);
  ggml_build_forward_expand(impl_->graph, impl_->result);
  impl_->buffer = ggml_backend_alloc_ctx_tensors(context, impl_->backend);
  if (impl_->buffer == nullptr) throw std::runtime_error("ggml could not allocate the tensors");

  ggml_backend_tensor_set(q_rows, q.data(), 0, ggml_nbytes(q_rows));
  std::vector<ggml_fp16_t> half(k.size());
  ggml_fp32_to_fp16_row(k.data(), half.data(), static_cast<std::int64_t>(k.size()));
  ggml_backend_tensor_set(k_rows, half.data(), 0, ggml_nbytes(k_rows));
  ggml_fp32_to_fp16_row(v.data(), half.data(), static_cast<std::int64_t>(v.size()));
  ggml_backend_tensor_set(v_rows, half.data(), 0, ggml_nbytes(v_rows));

  const ggml_fp16_t visible = ggml_fp32_to_fp16(0.0F);
  const ggml_fp16_t hidden = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
  std::vector<ggml_fp16_t> row(tokens, hidden);
  for (std::int64_t i = 0; i < tokens; ++i) {
    row[i] = visible;
    ggml_backend_tensor_set(mask, row.data(), static_cast<std::size_t>(i * tokens) * sizeof(row[0]),
                            ggml_row_size(GGML_TYPE_F16, tokens));
  }
}

GgmlAttention::~GgmlAttention() = default;

void GgmlAttention::run() {
  if (ggml_backend_graph_compute(impl_->backend, impl_->graph) != GGML_STATUS_SUCCESS) {
    throw std::runtime_error("ggml failed to compute flash attention");
  }
}

const float* GgmlAttention::output() const {
  return static_cast<const float*>(impl_->result->data);
}

std::string GgmlAttention::version() { return ggml_version(); }

}  // namespace minference::bench

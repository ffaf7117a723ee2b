#include "bench/ggml_peer.h"

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
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
  if (set != nullptr) set(backend, threads);
}

// A graph of one operation on the CPU backend, and all that it needs.
struct Graph {
  ggml_backend_t backend = nullptr;
  ggml_context* context = nullptr;
  ggml_backend_buffer_t buffer = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* result = nullptr;

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (buffer != nullptr) ggml_backend_buffer_free(buffer);
    if (context != nullptr) ggml_free(context);
    if (backend != nullptr) ggml_backend_free(backend);
  }

  void open(int threads) {
    // Loading twice would register every module twice.
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) ggml_backend_load_all();
    backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (backend == nullptr) throw std::runtime_error("ggml has no CPU backend here");
    set_threads(backend, threads);
    context = ggml_init({ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true});
  }

  // Allocates what the operation reads and writes.
  void close(ggml_tensor* operation) {
    result = operation;
    graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, result);
    buffer = ggml_backend_alloc_ctx_tensors(context, backend);
    if (buffer == nullptr) throw std::runtime_error("ggml could not allocate the tensors");
  }

  void run() const {
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
      throw std::runtime_error("ggml failed to compute the operation");
    }
  }
};

// The CPU backend's extra buffer type (its repacked layouts) that can run `operation`, or null.
ggml_backend_buffer_type_t repacked_type(ggml_backend_t backend, ggml_tensor* weight,
                                         ggml_tensor* operation) {
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  ggml_backend_buffer_type_t* types = get == nullptr ? nullptr : get(device);
  for (; types != nullptr && *types != nullptr; ++types) {
    // As llama.cpp asks: an empty buffer of the type stands in for the weight's.
    weight->buffer = ggml_backend_buft_alloc_buffer(*types, 0);
    const bool supported = ggml_backend_dev_supports_op(device, operation);
    ggml_backend_buffer_free(weight->buffer);
    weight->buffer = nullptr;
    if (supported) return *types;
  }
  return nullptr;
}

}  // namespace

struct GgmlAttention::Impl : Graph {};
struct GgmlMatMul::Impl : Graph {
  ggml_context* weight_context = nullptr;
  ggml_backend_buffer_t weight_buffer = nullptr;
  ggml_tensor* weight = nullptr;
  bool repacked = false;

  ~Impl() {
    if (weight_buffer != nullptr) ggml_backend_buffer_free(weight_buffer);
    if (weight_context != nullptr) ggml_free(weight_context);
  }
};

GgmlAttention::GgmlAttention(const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v, std::int64_t tokens, std::int64_t q_heads,
                             std::int64_t kv_heads, std::int64_t head_dim, int threads)
    : impl_(std::make_unique<Impl>()) {
  impl_->open(threads);
  ggml_context* context = impl_->context;
  // The order of memory is [tokens][heads][dim], as in llama.cpp's cache; the op wants heads last.
  ggml_tensor* q_rows = ggml_new_tensor_3d(context, GGML_TYPE_F32, head_dim, q_heads, tokens);
  ggml_tensor* k_rows = ggml_new_tensor_3d(context, GGML_TYPE_F16, head_dim, kv_heads, tokens);
  ggml_tensor* v_rows = ggml_new_tensor_3d(context, GGML_TYPE_F16, head_dim, kv_heads, tokens);
  ggml_tensor* mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, tokens, tokens);
  const float scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  impl_->close(ggml_flash_attn_ext(
      context, ggml_permute(context, q_rows, 0, 2, 1, 3), ggml_permute(context, k_rows, 0, 2, 1, 3),
      ggml_permute(context, v_rows, 0, 2, 1, 3), mask, scale, 0.0F, 0.0F));

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

void GgmlAttention::run() { impl_->run(); }

const float* GgmlAttention::output() const {
  return static_cast<const float*>(impl_->result->data);
}

GgmlMatMul::GgmlMatMul(ggml_type type, const std::vector<float>& weight,
                       const std::vector<float>& activations, std::int64_t rows, std::int64_t cols,
                       std::int64_t tokens, int threads, bool repack)
    : impl_(std::make_unique<Impl>()) {
  impl_->open(threads);
  impl_->weight_context = ggml_init({ggml_tensor_overhead() * 2, nullptr, true});
  ggml_tensor* w = ggml_new_tensor_2d(impl_->weight_context, type, cols, rows);
  ggml_tensor* a = ggml_new_tensor_2d(impl_->context, GGML_TYPE_F32, cols, tokens);
  ggml_tensor* product = ggml_mul_mat(impl_->context, w, a);
  ggml_backend_buffer_type_t buffer_type =
      repack ? repacked_type(impl_->backend, w, product) : nullptr;
  impl_->repacked = buffer_type != nullptr;
  if (buffer_type == nullptr) buffer_type = ggml_backend_get_default_buffer_type(impl_->backend);
  impl_->weight_buffer =
      ggml_backend_alloc_ctx_tensors_from_buft(impl_->weight_context, buffer_type);
  if (impl_->weight_buffer == nullptr) throw std::runtime_error("ggml could not allocate a weight");
  ggml_backend_buffer_set_usage(impl_->weight_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  impl_->weight = w;
  std::vector<char> quantised(ggml_row_size(type, cols) * static_cast<std::size_t>(rows));
  ggml_quantize_chunk(type, weight.data(), quantised.data(), 0, rows, cols, nullptr);
  ggml_backend_tensor_set(w, quantised.data(), 0, quantised.size());
  impl_->close(product);
  ggml_backend_tensor_set(a, activations.data(), 0, ggml_nbytes(a));
}

GgmlMatMul::~GgmlMatMul() = default;

void GgmlMatMul::run() { impl_->run(); }

const float* GgmlMatMul::output() const { return static_cast<const float*>(impl_->result->data); }

const ggml_tensor* GgmlMatMul::weight() const { return impl_->repacked ? nullptr : impl_->weight; }

bool GgmlMatMul::repacked() const { return impl_->repacked; }

std::string ggml_library_version() { return ggml_version(); }

}  // namespace minference::bench

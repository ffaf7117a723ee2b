#include "bench/cuda_inputs.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "attention/cuda/check.h"

namespace minference::bench {
namespace {

__device__ std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// Uniform in (0, 1), a pure function of its arguments.
__device__ float uniform(std::uint64_t seed, std::uint64_t i) {
  return (static_cast<float>(mix(seed * 0x9E3779B97F4A7C15ULL + i) >> 40) + 0.5F) / 16777216.0F;
}

__device__ float normal(std::uint64_t seed, std::uint64_t i) {
  return sqrtf(-2.0F * logf(uniform(seed, 2 * i))) * cospif(2.0F * uniform(seed, 2 * i + 1));
}

// What a tensor is filled as.
enum class Role { kQuery, kKey, kValue };

__global__ void fill(__nv_bfloat16* to, std::int64_t tokens, int heads, int group, int dim,
                     InputKind kind, Role role, std::uint64_t seed) {
  const std::int64_t pairs = tokens * heads * (dim / 2);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < pairs;
       i += step) {
    const int f = static_cast<int>(i % (dim / 2));
    const int h = static_cast<int>(i / (dim / 2) % heads);
    const std::int64_t t = i / (dim / 2) / heads;
    __nv_bfloat16* const row = to + (t * heads + h) * dim;
    float x = normal(seed + static_cast<int>(role), 2 * i);
    float y = normal(seed + static_cast<int>(role), 2 * i + 1);
    if (kind == InputKind::kStructured && role != Role::kValue) {
      const int kv_head = role == Role::kQuery ? h / group : h;
      const float strength = 1.0F + 1.5F * uniform(seed + 11, kv_head * dim + f);
      const float angle = 6.2831853F * uniform(seed + 12, kv_head * dim + f);
      x = 0.8F * x + strength * cosf(angle);
      y = 0.8F * y + strength * sinf(angle);
      const bool heavy =
          role == Role::kKey && (t < 4 || mix(seed * 31 + t * 131 + kv_head) % 400 == 0);
      // The lowest frequencies hardly turn: what lies there is heavy from any distance.
      if (heavy && f >= dim * 3 / 8) {
        x += 3.0F * cosf(angle);
        y += 3.0F * sinf(angle);
      }
      const float turn = static_cast<float>(t) * powf(500000.0F, -2.0F * f / dim);
      const float c = cosf(turn);
      const float s = sinf(turn);
      const float rotated = x * c - y * s;
      y = x * s + y * c;
      x = rotated;
    }
    row[f] = __float2bfloat16(x);
    row[f + dim / 2] = __float2bfloat16(y);
  }
}

TensorView filled(InputKind kind, std::int64_t tokens, std::int64_t heads, std::int64_t group,
                  std::int64_t dim, Role role, std::uint64_t seed) {
  void* data = nullptr;
  cuda::check(cudaMalloc(&data, static_cast<std::size_t>(tokens * heads * dim * 2)),
              "allocating the inputs");
  fill<<<2048, 256>>>(static_cast<__nv_bfloat16*>(data), tokens, static_cast<int>(heads),
                      static_cast<int>(group), static_cast<int>(dim), kind, role, seed);
  cuda::check(cudaGetLastError(), "filling the inputs");
  return TensorView::contiguous(data, DType::kBF16, {1, tokens, heads, dim},
                                {Device::Kind::kCuda, 0});
}

}  // namespace

CudaInputs::CudaInputs(InputKind kind, std::int64_t tokens, std::int64_t q_heads,
                       std::int64_t kv_heads, std::int64_t head_dim, std::uint64_t seed)
    : q(filled(kind, tokens, q_heads, q_heads / kv_heads, head_dim, Role::kQuery, seed)),
      k(filled(kind, tokens, kv_heads, 1, head_dim, Role::kKey, seed)),
      v(filled(kind, tokens, kv_heads, 1, head_dim, Role::kValue, seed)),
      out(filled(kind, tokens, q_heads, 1, head_dim, Role::kValue, seed + 1)) {
  cuda::check(cudaDeviceSynchronize(), "filling the inputs");
}

CudaInputs::~CudaInputs() {
  for (const TensorView& tensor : {q, k, v, out}) cudaFree(tensor.data);
}

}  // namespace minference::bench

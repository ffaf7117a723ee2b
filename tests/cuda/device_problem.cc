#include "cuda/device_problem.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>

#include "attention/cuda/host_index.h"
#include "attention/kept_pairs.h"
#include "attention/validate.h"

namespace minference::test {
namespace {

std::vector<std::int32_t> narrowed(std::span<const std::int64_t> values) {
  return {values.begin(), values.end()};
}

// Words from the first to the last one that the mask's rows use.
std::int64_t mask_words(const AttentionInput& input) {
  const VisibilityMask& mask = input.mask;
  return (input.q.batch() - 1) * mask.sequence_stride + (input.q.tokens() - 1) * mask.row_stride +
         (key_capacity(input) + 63) / 64;
}

// Turns the block lists of every second head into bits, the other block form of a DeviceIndex.
std::vector<std::uint32_t> some_as_bits(const SparseIndex& index, std::int64_t kv_tokens,
                                        cuda::HostIndex& host) {
  std::vector<std::uint32_t> bits(1);
  const std::int64_t words = ((kv_tokens + kKeyBlock - 1) / kKeyBlock + 31) / 32;
  for (std::size_t i = 1; i < index.heads.size(); i += 2) {
    const HeadIndex& head = index.heads[i];
    if (head.kind != HeadIndex::Kind::kBlock) continue;
    const std::int64_t begin = std::ssize(bits);
    const std::int64_t rows = std::ssize(head.block_begin) - 1;
    bits.resize(begin + rows * words);
    for (std::int64_t m = 0; m < rows; ++m) {
      for (std::int64_t k = head.block_begin[m]; k < head.block_begin[m + 1]; ++k) {
        const std::int32_t n = head.block_ids[k];
        bits[begin + m * words + n / 32] |= 1U << (n % 32);
      }
    }
    host.heads[i].bit_block_size = static_cast<std::int32_t>(kKeyBlock);
    host.heads[i].bit_words = static_cast<std::int32_t>(words);
    host.heads[i].block_id_begin = begin;
  }
  return bits;
}

}  // namespace

void check_cuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " +
                           cudaGetErrorString(static_cast<cudaError_t>(error)));
}

DeviceBuffer::DeviceBuffer(std::int64_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))),
             "cudaMalloc");
  data_.reset(static_cast<char*>(data));
}

void DeviceBuffer::Free::operator()(char* data) const { cudaFree(data); }

void DeviceBuffer::upload(const void* from, std::int64_t bytes, std::int64_t at) {
  check_cuda(cudaMemcpy(data() + at, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
             "copy to the device");
}

void DeviceBuffer::download(void* to, std::int64_t bytes, std::int64_t at) const {
  check_cuda(cudaMemcpy(to, data() + at, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
             "copy from the device");
}

DeviceProblem::Tensor DeviceProblem::upload_tensor(const TensorView& view,
                                                   cuda::DeviceTensor& device) {
  Tensor tensor;
  tensor.host = view;
  device.dtype = view.dtype;
  device.batch_stride = view.strides[0];
  device.token_stride = view.strides[1];
  device.head_stride = view.strides[2];
  if (view.empty()) return tensor;
  const std::int64_t size = dtype_size(view.dtype);
  std::int64_t highest = 0;
  for (int axis = 0; axis < 4; ++axis) {
    const std::int64_t reach = (view.shape[axis] - 1) * view.strides[axis] * size;
    (reach < 0 ? tensor.lowest : highest) += reach;
  }
  tensor.bytes = highest + size - tensor.lowest;
  constexpr std::int64_t kAlignment = 256;  // of cudaMalloc
  const char* const lowest = static_cast<const char*>(view.data) + tensor.lowest;
  tensor.offset = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(lowest) % kAlignment);
  tensor.buffer = DeviceBuffer(tensor.offset + tensor.bytes);
  tensor.buffer.upload(lowest, tensor.bytes, tensor.offset);
  device.data = tensor.buffer.data() + tensor.offset - tensor.lowest;
  return tensor;
}

void DeviceProblem::download_tensor(const Tensor& tensor) {
  if (tensor.host.empty()) return;
  tensor.buffer.download(static_cast<char*>(tensor.host.data) + tensor.lowest, tensor.bytes,
                         tensor.offset);
}

template <class T>
const T* DeviceProblem::upload(const std::vector<T>& values) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  arrays_.emplace_back(bytes);
  arrays_.back().upload(values.data(), bytes);
  return reinterpret_cast<const T*>(arrays_.back().data());
}

void DeviceProblem::upload_index(const AttentionInput& input, const SparseIndex& index) {
  cuda::HostIndex host(index, input.q.tokens());
  index_.block_bits = upload(some_as_bits(index, key_capacity(input), host));
  index_.heads = upload(host.heads);
  index_.runs = upload(host.runs);
  index_.columns = upload(host.columns);
  index_.block_rows = upload(host.block_rows);
  index_.block_ids = upload(host.block_ids);
  index_.column_capacity = std::ssize(host.columns);
}

DeviceProblem::DeviceProblem(const AttentionInput& input, const AttentionParams& params,
                             const AttentionOutput& output, const SparseIndex* index) {
  q_ = upload_tensor(input.q, problem_.q);
  k_ = upload_tensor(input.k, problem_.k);
  v_ = upload_tensor(input.v, problem_.v);
  out_ = upload_tensor(output.out, problem_.out);
  lse_ = upload_tensor(output.lse, problem_.lse);
  if (!input.q_lens.empty()) problem_.q_lens = upload(narrowed(input.q_lens));
  if (!input.kv_lens.empty()) problem_.kv_lens = upload(narrowed(input.kv_lens));
  if (!input.block_table.empty()) {
    problem_.block_table =
        upload(std::vector<std::int32_t>(input.block_table.begin(), input.block_table.end()));
    problem_.page_size = static_cast<std::int32_t>(input.k.tokens());
    problem_.pages_per_sequence = static_cast<std::int32_t>(input.pages_per_sequence);
  }
  if (!input.sinks.empty()) {
    problem_.sinks = upload(std::vector<float>(input.sinks.begin(), input.sinks.end()));
  }
  if (!input.mask.empty()) {
    const std::uint64_t* const words = input.mask.words;
    problem_.mask = upload(std::vector<std::uint64_t>(words, words + mask_words(input)));
    problem_.mask_row_stride = input.mask.row_stride;
    problem_.mask_sequence_stride = input.mask.sequence_stride;
  }
  problem_.batch = static_cast<std::int32_t>(input.q.batch());
  problem_.q_tokens = static_cast<std::int32_t>(input.q.tokens());
  problem_.kv_tokens = static_cast<std::int32_t>(key_capacity(input));
  problem_.q_heads = static_cast<std::int32_t>(input.q.heads());
  problem_.kv_heads = static_cast<std::int32_t>(input.k.heads());
  problem_.group = problem_.q_heads / problem_.kv_heads;
  problem_.dim = static_cast<std::int32_t>(input.q.dim());
  problem_.v_dim = static_cast<std::int32_t>(input.v.dim());
  problem_.window = static_cast<std::int32_t>(std::min(params.sliding_window, cuda::kMaxPosition));
  problem_.causal = params.causal;
  problem_.scale =
      params.scale != 0 ? params.scale : 1 / std::sqrt(static_cast<float>(input.q.dim()));
  problem_.soft_cap = params.soft_cap;
  const unsigned long long none = 0;
  kept_pairs_ = DeviceBuffer(sizeof(none));
  kept_pairs_.upload(&none, sizeof(none));
  problem_.kept_pairs = reinterpret_cast<unsigned long long*>(kept_pairs_.data());
  if (index != nullptr) upload_index(input, *index);
}

void DeviceProblem::download() {
  check_cuda(cudaGetLastError(), "kernel launch");
  check_cuda(cudaDeviceSynchronize(), "kernel");
  download_tensor(out_);
  download_tensor(lse_);
}

std::int64_t DeviceProblem::kept_pairs() const {
  unsigned long long pairs = 0;
  kept_pairs_.download(&pairs, sizeof(pairs));
  return static_cast<std::int64_t>(pairs);
}

Stats run_on_device(const Launch& launch, const AttentionInput& input,
                    const AttentionParams& params, const AttentionOutput& output,
                    const SparseIndex* index, IsaLevel level) {
  DeviceProblem device(input, params, output, index);
  launch(device.problem(), device.index());
  device.download();
  Stats stats;
  stats.isa = level;
  stats.kept_pairs = device.kept_pairs();
  const std::vector<std::int64_t> causal = kept_pairs(input, params, nullptr);
  stats.causal_pairs = std::accumulate(causal.begin(), causal.end(), std::int64_t{0});
  return stats;
}

IsaLevel owed_level(const AttentionInput& input) {
  const bool f32 =
      input.q.dtype == DType::kF32 && input.k.dtype == DType::kF32 && input.v.dtype == DType::kF32;
  return f32 ? IsaLevel::kGeneric : IsaLevel::kAvx512Bf16;
}

}  // namespace minference::test

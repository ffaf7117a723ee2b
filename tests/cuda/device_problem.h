// DeviceProblem: one call of attention() copied to the device, for testing kernels there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "attention/cuda/device_index.h"
#include "attention/cuda/problem.h"
#include "minference/attention.h"

namespace minference::test {

// Throws std::runtime_error naming `what` unless a CUDA call (a cudaError_t) succeeded.
void check_cuda(int error, const char* what);

// Device memory of exactly this many bytes, so that a memory checker sees every step outside.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t bytes);

  char* data() const { return data_.get(); }
  void upload(const void* from, std::int64_t bytes, std::int64_t at = 0);
  void download(void* to, std::int64_t bytes, std::int64_t at = 0) const;

 private:
  struct Free {
    void operator()(char* data) const;
  };
  std::unique_ptr<char, Free> data_;
};

// Every tensor keeps its strides, the bytes between its rows and its alignment.
class DeviceProblem {
 public:
  DeviceProblem(const AttentionInput& input, const AttentionParams& params,
                const AttentionOutput& output, const SparseIndex* index);

  const cuda::Problem& problem() const { return problem_; }
  const cuda::DeviceIndex& index() const { return index_; }

  // Copies output, LSE and everything between their rows back to the host; waits for the device.
  void download();
  // Pairs that the kernel counted.
  std::int64_t kept_pairs() const;

 private:
  struct Tensor {
    TensorView host;
    std::int64_t lowest = 0;  // bytes from the host's data pointer
    std::int64_t bytes = 0;
    std::int64_t offset = 0;  // of the lowest byte in the buffer
    DeviceBuffer buffer;
  };

  static Tensor upload_tensor(const TensorView& view, cuda::DeviceTensor& device);
  static void download_tensor(const Tensor& tensor);
  template <class T>
  const T* upload(const std::vector<T>& values);
  void upload_index(const AttentionInput& input, const SparseIndex& index);

  cuda::Problem problem_;
  cuda::DeviceIndex index_;
  Tensor q_, k_, v_, out_, lse_;
  DeviceBuffer kept_pairs_;
  std::vector<DeviceBuffer> arrays_;
};

// Launches a kernel for the problem in the default stream.
using Launch = std::function<void(const cuda::Problem&, const cuda::DeviceIndex&)>;

// Runs a kernel as a Runner of sweep.h does. Stats hold the pairs that the kernel counted, and
// `level` as the level that ran.
Stats run_on_device(const Launch& launch, const AttentionInput& input,
                    const AttentionParams& params, const AttentionOutput& output,
                    const SparseIndex* index, IsaLevel level);

// The level whose accuracy a device kernel owes: a bf16 level where an input has 16 bits.
IsaLevel owed_level(const AttentionInput& input);

}  // namespace minference::test

// Workspace: the device memory of one call, from the stream-ordered pool, and host data copied there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace minference::cuda {

class Workspace {
 public:
  explicit Workspace(cudaStream_t stream) : stream_(stream) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Memory until the end of this object's life in the stream's order; aligned to 256 bytes.
  char* allocate(std::int64_t bytes);

  // A copy of the values; null when there are none.
  template <class T>
  const T* upload(std::span<const T> values) {
    return reinterpret_cast<const T*>(
        upload_bytes(values.data(), static_cast<std::int64_t>(values.size_bytes())));
  }

 private:
  char* upload_bytes(const void* from, std::int64_t bytes);

  cudaStream_t stream_;
  std::vector<char*> allocations_;
};

}  // namespace minference::cuda
